"""The families of open diffusion language models: how each is recognised, what its config says about its network, and
which keys its weights have. docs/models.md lists them, with those that no published output has checked."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from difflm.errors import UsageError
from difflm.models.sampling import Sampling
from difflm.networks.dit import Dit, DitShape
from difflm.networks.open_transformer import OpenTransformer, Shape

Config = Mapping[str, Any]
EMBEDDING, HEAD, HEAD_BIAS = "embedding", "head.weight", "head.bias"  # weights with a row for each token
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|sampling_eps_(min|max)|attn\.(bias|masked_bias))$")


@dataclass(frozen=True)
class Stored:
    """Where a weight is stored: under a released key, as one of some equal parts of its rows."""

    key: str
    part: int = 0
    parts: int = 1
    transposed: bool = False  # GPT-2 stores matrices as [in, out]

    def take(self, tensor: Tensor) -> Tensor:
        rows = tensor.T if self.transposed and tensor.dim() == 2 else tensor
        return rows.chunk(self.parts)[self.part] if self.parts > 1 else rows


@dataclass(frozen=True)
class Family:
    """`find_key` maps each weight of the network to its key in the file. `mask` is the mask's id if config and
    tokenizer do not give it. `ends` are tokens that end an answer in addition to the usual one. `tokenizer` is the Hub
    name of the tokenizer, if the files have none. `find_block` reads the block size from the name of a directory, if
    the config does not give it."""

    name: str
    read_shape: Callable[[Config], Shape | DitShape]
    find_key: Callable[[str], Stored]
    sampling: Sampling
    mask: Callable[[Config], int | None] = lambda config: None
    noise: Literal["masks", "uniform", "gaussian"] = "masks"
    context: Callable[[Config], int] = lambda config: int(config["max_position_embeddings"])
    vocabulary: Callable[[Config], int] = lambda config: int(config["vocab_size"])
    ends: tuple[str, ...] = ()
    tokenizer: str = ""
    find_block: Callable[[str], int] = lambda name: 0

    def build_network(self, config: Config, words: int) -> nn.Module:
        shape = self.read_shape(config)
        return Dit(shape, words) if isinstance(shape, DitShape) else OpenTransformer(shape, words)


# -- Llama, Qwen and their like ---------------------------------------------------------------------------------------


def read_llama(config: Config, **more: Any) -> Shape:
    """The common names of Llama, Qwen2 and Qwen3."""
    refuse_unread(config, rope_scaling=None, use_sliding_window=False, hidden_act="silu", mlp_bias=False)
    rope = config.get("rope_parameters") or config  # as transformers 5 writes it
    refuse_unread(rope, rope_type="default")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Shape(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        inner=config["intermediate_size"],
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        eps=config["rms_norm_eps"],
        rope=float(rope.get("rope_theta", 10_000.0)),
        **{
            "qkv_bias": bool(config.get("attention_bias", False)),
            "out_bias": bool(config.get("attention_bias")),
            **more,
        },
    )


def refuse_unread(config: Config, **usual: Any) -> None:
    """Reject a config whose settings the network does not support."""
    for key, value in usual.items():
        if config.get(key, value) not in (value, None):
            raise UsageError(f"{key}={config[key]!r} is not supported, only {value!r}")


def llama_key(name: str) -> Stored:
    tops = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
    return Stored(tops.get(name, f"model.{name}"))


def read_llada(config: Config) -> Shape:
    refuse_unread(config, alibi=False, rope=True, block_type="llama", layer_norm_type="rms", activation_type="silu")
    refuse_unread(config, include_bias=False, include_qkv_bias=False, attention_layer_norm=False, input_emb_norm=False)
    refuse_unread(config, scale_logits=False, block_group_size=1, bias_for_layer_norm=False)
    heads, hidden = config["n_heads"], config["d_model"]
    return Shape(
        hidden=hidden,
        layers=config["n_layers"],
        heads=heads,
        inner=config.get("mlp_hidden_size") or config["mlp_ratio"] * hidden,
        kv_heads=config.get("n_kv_heads") or heads,
        head_dim=hidden // heads,
        eps=config["rms_norm_eps"],
        rope=config["rope_theta"],
    )


def read_modernbert(config: Config) -> Shape:
    refuse_unread(config, hidden_activation="gelu", classifier_activation="gelu", classifier_bias=False)
    refuse_unread(config, attention_bias=False, mlp_bias=False, norm_bias=False, decoder_bias=True)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Shape(
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        inner=config["intermediate_size"],
        kv_heads=heads,
        head_dim=hidden // heads,
        eps=config["norm_eps"],
        norm="layer",
        rope=config["global_rope_theta"],
        activation="gelu",
        window=config["local_attention"] // 2,
        local_rope=config["local_rope_theta"] or config["global_rope_theta"],
        global_every=config["global_attn_every_n_layers"],
        embedding_norm=True,
        transforms=True,
        head_bias=True,
    )


MODERNBERT = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.o_proj": "attn.Wo",
    "mlp.down_proj": "mlp.Wo",
}


def modernbert_key(name: str) -> Stored:
    tops = {
        EMBEDDING: "model.embeddings.tok_embeddings.weight",
        HEAD: "decoder.weight",
        HEAD_BIAS: "decoder.bias",
        "embedding_norm.weight": "model.embeddings.norm.weight",
        "norm.weight": "model.final_norm.weight",
        "transform.weight": "head.dense.weight",
        "transform_norm.weight": "head.norm.weight",
    }
    if name in tops:
        return Stored(tops[name])
    _, number, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    for whole, parts in (("attn.Wqkv", THREE), ("mlp.Wi", ["mlp.gate_proj", "mlp.up_proj"])):
        if part in parts:
            return Stored(f"model.layers.{number}.{whole}.{kind}", parts.index(part), len(parts))
    return Stored(f"model.layers.{number}.{MODERNBERT[part]}.{kind}")


THREE = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
LLADA = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def llada_key(name: str) -> Stored:
    tops = {EMBEDDING: "wte.weight", HEAD: "ff_out.weight", "norm.weight": "ln_f.weight"}
    if name in tops:
        return Stored(f"model.transformer.{tops[name]}")
    _, number, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return Stored(f"model.transformer.blocks.{number}.{LLADA[part]}.{kind}")


# -- GPT-2 ------------------------------------------------------------------------------------------------------------


def read_gpt2(config: Config) -> Shape:
    refuse_unread(config, activation_function="gelu_new", scale_attn_weights=True)
    refuse_unread(config, scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False)
    hidden, heads = config["n_embd"], config["n_head"]
    return Shape(
        hidden=hidden,
        layers=config["n_layer"],
        heads=heads,
        inner=config.get("n_inner") or 4 * hidden,
        kv_heads=heads,
        head_dim=hidden // heads,
        eps=config["layer_norm_epsilon"],
        norm="layer",
        norm_bias=True,
        rope=0.0,
        positions=config["n_positions"],
        qkv_bias=True,
        out_bias=True,
        feed_bias=True,
        gated=False,
        activation="gelu_tanh",
        shift=True,
    )


GPT2 = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def diffugpt_key(name: str) -> Stored:
    tops = {EMBEDDING: "embed_tokens.weight", HEAD: "lm_head.weight", "places.weight": "denoise_model.wpe.weight"}
    if name in tops:
        return Stored(tops[name])
    if name.startswith("norm."):
        return Stored(f"denoise_model.ln_f.{name.removeprefix('norm.')}")
    _, number, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    if part in THREE:
        return Stored(f"denoise_model.h.{number}.attn.c_attn.{kind}", THREE.index(part), 3, transposed=True)
    return Stored(f"denoise_model.h.{number}.{GPT2[part]}.{kind}", transposed=True)


# -- the DiT ----------------------------------------------------------------------------------------------------------


def read_dit(config: Config) -> DitShape:
    """The names of MDLM; with a block, of BD3-LM; with classes, of UDLM."""
    refuse_unread(config, causal=False, adaln=True)
    return DitShape(
        hidden=config["hidden_dim"],
        layers=config["n_blocks"],
        heads=config["n_heads"],
        condition=config["cond_dim"],
        timed=bool(config.get("time_conditioning", False)),
        classes=config["cfg_num_classes"] + 1 if config.get("cfg") else 0,
        block=config["block_size"] if config.get("cross_attn") else 0,
    )


def read_sedd(config: Config) -> DitShape:
    refuse_unread(config["graph"], type="absorb")
    refuse_unread(config["noise"], type="loglinear")
    sizes = config["model"]
    return DitShape(sizes["hidden_size"], sizes["n_blocks"], sizes["n_heads"], sizes["cond_dim"], timed=True)


def bare_dit_key(name: str) -> Stored:
    tops = {
        EMBEDDING: "vocab_embed.embedding",
        HEAD: "output_layer.linear.weight",
        HEAD_BIAS: "output_layer.linear.bias",
    }
    return Stored(tops.get(name, name))


def dit_key(name: str) -> Stored:
    return Stored(f"backbone.{bare_dit_key(name).key}")


GPT2_WORDS, BERT_WORDS = "openai-community/gpt2", "google-bert/bert-base-uncased"


def dit_family(name: str, sampling: Sampling, **more: Any) -> Family:
    own = {
        "read_shape": read_dit,
        "find_key": dit_key,
        "context": lambda config: int(config["model_length"]),
        "tokenizer": GPT2_WORDS,
    }
    return Family(name, sampling=sampling, **{**own, **more})


def last_id(config: Config) -> int:
    """The mask of the DiTs is the last row of their embedding."""
    return int(config["vocab_size"]) - 1


def read_duo(config: Config) -> DitShape:
    """A DiT that always has the time as input."""
    return replace(read_dit(config), timed=True)


def read_langflow(config: Config) -> DitShape:
    """A DiT over word vectors; loc and scale of its schedule are among its weights."""
    return replace(read_dit(config), timed=True, gumbel=config["gumbel"])


def block_of_name(pattern: str, size: int, otherwise: int = 0) -> Callable[[str], int]:
    """The positions per block by the name of a model: the number in the pattern, or `size` if it has none."""

    def find(name: str) -> int:
        found = re.search(pattern, name, re.IGNORECASE)
        return otherwise if found is None else int(found[1]) if found.groups() else size

    return find


# -- models that write from left to right, for methods that begin with one ---------------------------------------------


def gpt2_key(name: str) -> Stored:
    stored = diffugpt_key(name)
    return replace(stored, key=stored.key.replace("denoise_model.", "").replace("embed_tokens", "wte"))


CAUSAL: dict[str, tuple[Callable[[Config], Shape], Callable[[str], Stored]]] = {
    "llama": (read_llama, llama_key),
    "qwen2": (lambda config: read_llama(config, qkv_bias=True), llama_key),
    "qwen3": (lambda config: read_llama(config, head_norms=True), llama_key),
    "gpt2": (read_gpt2, gpt2_key),
}


# -- the table --------------------------------------------------------------------------------------------------------

CHAT_ENDS = ("<|eot_id|>", "<|im_end|>")
MASKS_OF_NAMES = {"diffugpt-s": 10541, "diffugpt-m": 50257, "diffullama": 811}  # which is in none of their files
FAMILIES = {
    "llada": Family(
        "llada",
        read_llada,
        llada_key,
        Sampling("confidence", steps=128, temperature=0.0, block=32),
        context=lambda config: int(config["max_sequence_length"]),
        vocabulary=lambda config: int(config.get("embedding_size") or config["vocab_size"]),
        ends=CHAT_ENDS,
    ),
    "dream": Family(
        "dream",
        lambda config: read_llama(config, qkv_bias=True, shift=True),
        llama_key,
        Sampling("entropy", steps=128, temperature=0.2, top_p=0.95),
        ends=CHAT_ENDS,
    ),
    "diffullama": Family(
        "diffullama",
        lambda config: read_llama(config, shift=True),
        llama_key,
        Sampling("first-hitting", steps=64, temperature=0.9, top_p=0.9),
    ),
    "diffugpt": Family(
        "diffugpt",
        read_gpt2,
        diffugpt_key,
        Sampling("first-hitting", steps=64, temperature=0.95, top_p=0.9),
        context=lambda config: int(config["n_positions"]),
    ),
    "a2d-qwen2": Family(
        "a2d-qwen2",
        lambda config: read_llama(config, qkv_bias=True, block=config.get("block_size") or 0),
        llama_key,
        Sampling("confidence", steps=128, temperature=0.0, block=32),
        ends=CHAT_ENDS,
        find_block=block_of_name("bd3lm", 32),
    ),
    "a2d-qwen3": Family(
        "a2d-qwen3",
        lambda config: read_llama(config, head_norms=True, block=config.get("block_size") or 0),
        llama_key,
        Sampling("confidence", steps=128, temperature=0.0, block=32),
        ends=CHAT_ENDS,
        find_block=block_of_name("bd3lm", 32),
    ),
    "sdar": Family(
        "sdar",
        lambda config: read_llama(config, head_norms=True, block=config["block_size"]),
        llama_key,
        Sampling("threshold", steps=128, sure=0.9),
        ends=CHAT_ENDS,
        find_block=block_of_name(r"-b(\d+)\b", 4, otherwise=4),
    ),
    "fast-dllm": Family(
        "fast-dllm",
        lambda config: read_llama(config, qkv_bias=True, shift=True, block=config["bd_size"]),
        llama_key,
        Sampling("threshold", steps=128, temperature=0.0, block=8, sure=0.95),
        mask=lambda config: 151665 if config["vocab_size"] > 151665 else None,
        ends=CHAT_ENDS,
    ),
    "modernbert": Family(
        "modernbert",
        read_modernbert,
        modernbert_key,
        Sampling("confidence", steps=128, temperature=0.0, block=32),
        ends=("[/Answer]",),
    ),
    "mdlm": dit_family("mdlm", Sampling(steps=128), mask=last_id),
    "bd3lm": dit_family("bd3lm", Sampling("first-hitting", steps=128, top_p=0.9), mask=last_id),
    "duo": dit_family("duo", Sampling(steps=128), read_shape=read_duo, noise="uniform"),
    "langflow": dit_family("langflow", Sampling("ddim", steps=128), read_shape=read_langflow, noise="gaussian"),
    "udlm": dit_family("udlm", Sampling(steps=128), noise="uniform", tokenizer=BERT_WORDS),
    "sedd": Family(
        "sedd",
        read_sedd,
        bare_dit_key,
        Sampling(steps=128),
        mask=lambda config: int(config["tokens"]),
        context=lambda config: int(config["model"]["length"]),
        vocabulary=lambda config: int(config["tokens"]) + 1,
        tokenizer=GPT2_WORDS,
    ),
}
