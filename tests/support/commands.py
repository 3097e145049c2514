"""The command as a test runs it."""

import shutil
from pathlib import Path

import pytest

from difflm.app.cli import main


@pytest.fixture
def complaint(capsys):
    """Run the command, expect it to fail with a code, and give what it said."""

    def run(code: int, *argv: object) -> str:
        capsys.readouterr()
        assert main([str(arg) for arg in argv]) == code
        err = capsys.readouterr().err
        assert err.startswith("difflm: ") and err.endswith("\n"), err
        assert len(err.splitlines()) <= 2, err
        assert "Traceback" not in err
        return err

    return run


def copy_of(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))
