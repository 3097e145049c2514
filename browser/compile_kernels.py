"""Compile the arithmetic of the page that runs a model in the browser: kernels.c to kernels.wasm, which lies
beside it, so that nobody else needs a compiler. A section of the file says which source it was made of.

pip install ziglang && python -m browser.compile_kernels
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from browser.export import HERE
from difflm.runtime.files import write_atomic

FLAGS = ["-target", "wasm32-freestanding", "-O3", "-msimd128", "-mbulk-memory", "-nostdlib", "-Wl,--no-entry"]


def source_section(source: bytes) -> bytes:
    """A custom section (WebAssembly 2.0, section 5.5.3) named "source" that holds the checksum of the source."""
    body = b"\x06source" + hashlib.sha256(source).digest()
    return bytes([0, len(body)]) + body


def main() -> None:
    source = HERE / "kernels.c"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "kernels.wasm"
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, "-Wl,--export=__heap_base", "-Wl,--strip-all"]
        subprocess.run([*command, "-o", str(made), str(source)], check=True)
        write_atomic(source.with_suffix(".wasm"), made.read_bytes() + source_section(source.read_bytes()))


if __name__ == "__main__":
    main()
