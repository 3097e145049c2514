"""Every choice that depends on the machine is one switch: whoever asks it follows it, either way, on any machine."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from difflm.controls.patterns.token_automata import TokenAutomaton, chain_of
from difflm.diffusion.denoiser import autocast_to
from difflm.errors import UsageError
from difflm.fast.cpu_layers import lacks_vnni
from difflm.fast.cuda_graphs import WARMUP_CALLS, CapturedCalls, CapturedFunction, is_capturing
from difflm.fast.kernels import has_kernel
from difflm.fast.products import is_tuned
from difflm.generation.checks import fastest_dtype
from difflm.generation.pipeline import TextDiffusion
from difflm.machine import NEEDED, SWITCHES, is_found, is_on, parse_switches, processor_name, turn
from difflm.networks.head import add_product
from difflm.runtime.distributed import choose_backend
from difflm.training import run as runs
from tests.support.tiny import tiny_run

BOTH = pytest.mark.parametrize("on", [True, False])
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_a_switch_is_as_found_unless_it_is_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFLM_SWITCHES", "")
    for name in SWITCHES:
        assert is_on(name) == is_found(name)
        for on in (True, False):
            with turn(**{name: on}):
                assert is_on(name) == on
                with turn(**{name: not on}):
                    assert is_on(name) != on
        assert is_on(name) == is_found(name)
    with pytest.raises(AssertionError), turn(unknown=True):
        pass


def test_the_environment_turns_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFLM_SWITCHES", "packed_weights=off, matrix_units=on")
    assert not is_on("packed_weights") and is_on("matrix_units") and is_on("vnni") == is_found("vnni")
    monkeypatch.setenv("DIFFLM_SWITCHES", "opposite")
    for name in SWITCHES:
        assert is_on(name) == (not is_found(name) and name not in NEEDED)


@pytest.mark.parametrize("text", ["packed=on", "vnni", "vnni=yes", "vnni=on;gpu=off", "opposite,vnni=on"])
def test_a_wrong_variable_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"DIFFLM_SWITCHES: .* Names: packed_weights, "):
        parse_switches(text)


def test_a_wrong_variable_gives_the_command_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "difflm", "generate", "e2e"],
        env={**os.environ, "DIFFLM_SWITCHES": "gpu=maybe"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_what_nothing_stands_in_for_is_turned_off_but_not_on(name: str) -> None:
    assert parse_switches(f"{name}=off") == {name: False}
    if is_found(name):
        assert parse_switches(f"{name}=on") == {name: True}
    else:
        with pytest.raises(UsageError, match=f"{name} cannot be turned on here"):
            parse_switches(f"{name}=on")


def test_the_page_lists_every_switch() -> None:
    """With when it is on, what it changes, and tests that exist."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row[0] for row in rows] == [*SWITCHES] and all(map(all, rows)) and {*SWITCHES} >= NEEDED
    for *_, tests in rows:
        for path in re.findall(r"\((\.\./tests/[\w/]+\.py)\)", tests):
            assert (PAGE.parent / path).is_file()
        assert "test_" in tests


COMMANDS = """
import sys
from difflm.app.cli import main
from difflm.training import validation
run, out = sys.argv[1:]
validation.VALIDATION_DRAWS = 8
model = "hidden=16 model.layers=1 model.heads=2"
for command in (
    f"generate {run} -n 1 --steps 2",
    f"generate {run} -n 1 --steps 2 --dtype bfloat16",
    f"generate {run} -n 1 --steps 2 --dtype int8",
    f"score {run} {out}/few.txt --draws 2",
    f"train own-text --out {out}/run data={out}/few.txt steps=2 batch_size=8 warmup=0 sample_every=0 model.{model} "
    "precision=bf16 more_than=0",
):
    assert main([*command.split(), "--device", "cpu"]) == 0, command
"""


def test_no_warning_reaches_a_reader(tiny_runs, tmp_path: Path) -> None:
    """Torch warned of products of eight bits and, on ARM, in bfloat16."""
    environment = {name: value for name, value in os.environ.items() if name != "DIFFLM_SWITCHES"}
    (tmp_path / "few.txt").write_text("".join(f"The old pub {k} serves French food.\n" for k in range(20)))
    command = [sys.executable, "-c", COMMANDS, str(tiny_runs["mdlm"]), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr


# -- what each switch changes, by value --------------------------------------------------------------------------------


@BOTH
def test_matrix_units_choose_the_dtype_and_the_batches_of_a_cpu(on: bool, tiny_runs, monkeypatch) -> None:
    monkeypatch.setattr(runs, "ONE_BY_ONE", 0)
    with turn(matrix_units=on):
        assert fastest_dtype(CPU) is (torch.bfloat16 if on else None)
        lm = TextDiffusion.from_pretrained(tiny_runs["mdlm"])
        assert lm.inference.dtype is (torch.bfloat16 if on else None)
        assert lm.model.capabilities.one_by_one == (lm.model.capabilities.whole_canvas and not on)
        assert lm.generate(1, steps=2)[0].text
    assert fastest_dtype(CUDA) is torch.bfloat16


@pytest.mark.native
@BOTH
def test_onednn_is_avoided_where_it_has_no_bfloat16(on: bool) -> None:
    torch._C._set_mkldnn_enabled(True)
    with turn(bfloat16=on):
        with autocast_to(CPU, torch.bfloat16):
            assert torch._C._get_mkldnn_enabled() == on and torch.is_autocast_enabled("cpu")
        with autocast_to(CPU, None):
            assert torch._C._get_mkldnn_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch._C._get_mkldnn_enabled()


@pytest.mark.native
def test_training_in_bfloat16_on_a_cpu_leaves_onednn_on(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Torch warned, and turned oneDNN off for the whole process, on an ARM processor without bfloat16."""
    torch._C._set_mkldnn_enabled(True)
    with turn(bfloat16=is_found("bfloat16")):
        tiny_run(tmp_path / "run", "mdlm", steps=2, precision="bf16")
    assert torch._C._get_mkldnn_enabled() and not [one for one in recwarn if "mkldnn" in str(one.message)]


@BOTH
@pytest.mark.parametrize("engine", ["x86", "onednn", None])
def test_inputs_have_seven_bits_on_x86_without_vnni(on: bool, engine: str | None, monkeypatch) -> None:
    monkeypatch.setattr("difflm.fast.cpu_layers.eight_bit_engine", lambda: engine)
    with turn(vnni=on):
        assert lacks_vnni() == (engine == "x86" and not on)


@BOTH
def test_a_gpu_is_what_processes_exchange_by(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("difflm.runtime.distributed.gpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with turn(gpu=on):
        assert choose_backend() == ("cpu:gloo,cuda:nccl" if on else "gloo") and chosen == [1] * on
        monkeypatch.setenv("LOCAL_RANK", "2")
        if on:
            with pytest.raises(UsageError, match="there are 2 GPUs here"):
                choose_backend()


@BOTH
def test_kernels_run_on_a_gpu_alone(on: bool) -> None:
    with turn(kernels=on):
        assert has_kernel(CUDA) == on and not has_kernel(CPU)


@BOTH
def test_large_products_of_a_gpu_are_tuned(on: bool) -> None:
    size = 4096, 2048
    matrix: Any = SimpleNamespace(
        shape=size, dtype=torch.bfloat16, is_cuda=True, data_ptr=lambda: 0, is_contiguous=lambda: True
    )
    with turn(tuned_products=on):
        assert is_tuned(matrix, matrix, matrix) == on and not is_tuned(*[torch.ones(size).bfloat16()] * 3)


def test_without_triton_patterns_have_plain_sums_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difflm.controls.patterns.token_automata.plain_chain", lambda automaton, device: "plain")
    automaton: TokenAutomaton = None  # type: ignore[assignment]  # which is not read
    with turn(triton=False):
        assert chain_of(automaton, CUDA) == "plain"
    with turn(triton=True):
        assert chain_of(automaton, CPU) == "plain"


@BOTH
def test_narrow_products_are_summed_in_float32(on: bool) -> None:
    """On a CPU as with ROCm: torch has no product there whose sum is wider."""
    one, other = torch.randn(5, 7, dtype=torch.bfloat16), torch.randn(7, 3, dtype=torch.bfloat16)
    with turn(rocm=on):
        total = add_product(add_product(None, one, other, torch.float32), one, other, torch.float32)
    assert total.dtype is torch.float32 and torch.allclose(
        total, 2 * (one.float() @ other.float()), rtol=0.05, atol=0.1
    )


@pytest.mark.parametrize("name", ["mdlm", "difflm"])
def test_a_cpu_that_records_writes_the_same(name: str, tiny_runs) -> None:
    texts = []
    for on in (True, False):
        with turn(cpu_recording=on):
            lm = TextDiffusion.from_pretrained(tiny_runs[name], dtype=torch.float32)
            texts.append([made.text for made in lm.generate(3, seed=2, steps=6)])
            assert bool(lm.inference._recorded.idle) == on
    assert texts[0] == texts[1]


def test_a_cpu_counts_as_capturing_from_the_call_that_would_be_captured() -> None:
    """Then what is captured within is a part of it, as on a GPU."""
    seen: list[bool] = []
    work = CapturedFunction(lambda: seen.append(is_capturing()), CPU)
    for _ in range(WARMUP_CALLS + 2):
        work()
    assert seen == [False] * WARMUP_CALLS + [True, True] and not is_capturing()
    layer = torch.nn.Linear(2, 2)
    calls, x = CapturedCalls(layer), torch.randn(1, 2)
    outer = CapturedFunction(lambda: seen.append(torch.equal(calls(x), layer(x))), CPU, warmup=0)
    outer()
    assert seen[-1] and not calls.pool.idle

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        CapturedFunction(fail, CPU, warmup=0)()
    assert not is_capturing()


def test_a_processor_has_a_name() -> None:
    assert processor_name()


def test_what_torch_says_of_itself_is_kept_off_the_screen() -> None:
    """Unless somebody asks Python for warnings. Our own ones are shown."""
    code = """
import sys, warnings
from difflm.app.cli import hush_torch
hush_torch()
warnings.warn_explicit("tiles are new", UserWarning, "x.py", 1, module="torch.nn.modules")
warnings.warn("switching to BLAS (Triggered internally at a.cpp:1.)")
warnings.warn("of our own")
"""
    for options, seen in ([], ["of our own"]), (["-W", "always"], ["tiles are new", "Triggered", "of our own"]):
        done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)
        told = ("tiles are new", "Triggered", "of our own")
        assert done.returncode == 0 and [one for one in told if one in done.stderr] == seen, done.stderr
