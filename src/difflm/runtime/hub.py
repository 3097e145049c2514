"""Files from and for the Hugging Face Hub, by `huggingface_hub`; `HF_ENDPOINT` names another server."""

import re
from pathlib import Path

from difflm.errors import DifflmError, UsageError

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
FETCHED = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]  # no code
NEEDED = 'huggingface_hub: pip install ".[hf]"'
REFUSED: dict[str | int, str] = {  # by the library's error or the status
    "RepositoryNotFoundError": "there is no such model there, or it is private",
    "RevisionNotFoundError": "there is no such revision there",
    401: "the Hub does not accept the token",
    403: "the token may not write there",
}


def is_hub_name(name_or_path: str | Path) -> bool:
    """Whether this is OWNER/NAME, and no directory."""
    return bool(HUB_NAME.fullmatch(str(name_or_path))) and not Path(name_or_path).exists()


def is_open_config(config: object) -> bool:
    """Whether a config.json is that of somebody else's model."""
    return isinstance(config, dict) and "format" not in config and bool({"model_type", "graph"} & config.keys())


def fetch_from_hub(name: str, revision: str | None = None) -> Path:
    """The local copy of a model's files on the Hub, of a branch, tag or commit; no code is among them."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        how = f"a model of the Hub is fetched with {NEEDED}"
        raise UsageError(f"{name} is neither a bundled model nor a directory; {how}.") from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FETCHED))
    except Exception as error:  # of many kinds
        what = "is neither a bundled model nor a directory, and the Hub does not give it"
        raise UsageError(f"{name} {what}: {explain_hub_error(error)}.") from None


def push_to_hub(folder: Path, repo: str, revision: str | None, token: str | None, private: bool) -> str:
    """Push a directory as one commit, and return its address. What does not get through changes no file there."""
    if not HUB_NAME.fullmatch(repo):
        raise UsageError(f"a model on the Hub is named OWNER/NAME, not {repo!r}.")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise UsageError(f"a model is pushed with {NEEDED}.") from None
    try:
        api = HfApi(token=token)
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        told = "A model of difflm"
        return str(api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=told))
    except Exception as error:  # of many kinds
        raise DifflmError(f"{repo} was not pushed: {explain_hub_error(error)}.") from None


def explain_hub_error(error: Exception) -> str:
    """What went wrong, in a line."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return REFUSED.get(type(error).__name__) or REFUSED.get(status) or said.strip().rstrip(".:")
