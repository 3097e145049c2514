"""Methods, one file per paper. Listing methods imports no torch: a method's parts are imported when it is built.

Methods of other packages join through the entry points `difflm.methods`, or by `difflm.methods.register`.
"""

from importlib import resources

import yaml

from difflm.methods.ar_diffusion import ArDiffusion
from difflm.methods.autoregressive import AutoregressiveTwin, DecoderOnly
from difflm.methods.base import Method
from difflm.methods.base import TextSpec as TextSpec
from difflm.methods.bert_mouth import BertMouth
from difflm.methods.block_diffusion import BlockDiffusionMethod
from difflm.methods.cdcd import Cdcd
from difflm.methods.classifier import GuidingClassifier
from difflm.methods.cmlm import Cmlm
from difflm.methods.d3pm import D3pmAbsorbing, D3pmNearest, D3pmUniform
from difflm.methods.diff_glat import DiffGlat
from difflm.methods.difflm import DiffLM
from difflm.methods.difformer import Difformer
from difflm.methods.diffuseq import DiffuSeq, DiffuSeqV2
from difflm.methods.diffuser import DiffusER
from difflm.methods.diffusion_lm import DiffusionLM
from difflm.methods.diffusion_nat import DiffusionNat
from difflm.methods.diffusionbert import DiffusionBert
from difflm.methods.dinoiser import Dinoiser
from difflm.methods.encoder_decoder import EncoderDecoderTwin
from difflm.methods.flow_map import FlowMap
from difflm.methods.genie import Genie
from difflm.methods.gidd import Gidd
from difflm.methods.glyph_diffusion import GlyphDiffusion
from difflm.methods.gpvae import Gpvae
from difflm.methods.ld4lg import Ld4lg
from difflm.methods.levt import LevT
from difflm.methods.mdlm import Mdlm
from difflm.methods.sed import Sed
from difflm.methods.sedd import Sedd
from difflm.methods.seqdiffuseq import SeqDiffuSeq
from difflm.methods.ssd_lm import SsdLm
from difflm.methods.udlm import Udlm
from difflm.runtime.registry import Registry

LISTED: tuple[type[Method], ...] = (
    DiffusionLM,
    DiffLM,
    FlowMap,
    DiffuSeq,
    SeqDiffuSeq,
    Genie,
    DiffuSeqV2,
    ArDiffusion,
    Cdcd,
    Sed,
    Difformer,
    Dinoiser,
    SsdLm,
    Ld4lg,
    GlyphDiffusion,
    D3pmUniform,
    D3pmAbsorbing,
    D3pmNearest,
    DiffusionBert,
    BertMouth,
    DiffGlat,
    DiffusionNat,
    DiffusER,
    Cmlm,
    Mdlm,
    Sedd,
    Udlm,
    Gidd,
    BlockDiffusionMethod,
    AutoregressiveTwin,
    EncoderDecoderTwin,
    DecoderOnly,
    Gpvae,
    LevT,
    GuidingClassifier,
)
METHODS: Registry[Method] = Registry("difflm.methods", Method, {method.name: method for method in LISTED})
register = METHODS.register


def read_measured() -> dict[str, dict[str, float]]:
    """What was measured of each method: `measured.yaml`."""
    found: dict[str, dict[str, float]] = yaml.safe_load(
        resources.files(__name__).joinpath("measured.yaml").read_text(encoding="utf-8")
    )
    return found
