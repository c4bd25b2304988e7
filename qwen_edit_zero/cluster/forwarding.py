"""What reaches ranks on other nodes: the environment, and words as they were typed.

`ssh` starts ranks with next to no environment, and hands what it runs to a shell; DeepSpeed quotes for that shell too
little (`$`, `;`, `"` keep their meaning, so a value can run a command) and pdsh replaces `%h`, `%n` and `%u`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from qwen_edit_zero.errors import ClusterError

# How ranks compute and communicate; the same on all nodes, or they would not do the same. No credentials: commands can
# be seen by everybody on a node.
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "CUBLAS_", "CUDA_DEVICE_", "CUDA_LAUNCH_")
_NAMES = ("DS_ACCELERATOR", "HF_HUB_OFFLINE", "TRITON_CACHE_DIR", "TOKENIZERS_PARALLELISM", "LD_LIBRARY_PATH", "TZ")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_BYTES = 1 << 20
DEEPSPEED_FILE = ".deepspeed_env"


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that ranks on other nodes get without being asked for."""
    return {k: v for k, v in sorted(environ.items()) if k.startswith(_PREFIXES) or k in _NAMES}


def environment_files(environ: Mapping[str, str], cwd: Path) -> list[Path]:
    """The files of variables that DeepSpeed reads: at home and in the working directory, or what DS_ENV_FILE names."""
    name = environ.get("DS_ENV_FILE", DEEPSPEED_FILE)
    places = [Path(os.path.expanduser("~")) / name, cwd / name]  # an absolute name is twice the same
    return [place for place in dict.fromkeys(places) if place.is_file()]


def read_environment_file(path: Path) -> dict[str, str]:
    """Return the variables of a file of lines NAME=VALUE; values are taken as they are, quotes included.

    Blank lines and lines that begin with # say nothing, blanks round name and value are dropped. Raises ClusterError
    naming file and line for any other line.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ClusterError(f"{path} has {path.stat().st_size} bytes; that is no file of environment variables")
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"the file of environment variables {path} cannot be read: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, sign, value = content.partition("=")
        if not sign:
            raise ClusterError(f"{path}:{number}: {content!r} has no '='; write NAME=VALUE")
        if not _NAME.fullmatch(name.strip()):
            raise ClusterError(f"{path}:{number}: {name.strip()!r} is not the name of a variable; write NAME=VALUE")
        if any(ord(char) < 32 and char != "\t" for char in value):
            raise ClusterError(f"{path}:{number}: the value of {name.strip()} holds a control character")
        found[name.strip()] = value.strip()
    return found


def for_pdsh(word: str) -> str:
    """`word` such that pdsh and the shell behind it make `word` of it."""
    return shlex.quote(word).replace("%", "%%")


def value_for_deepspeed(value: str) -> str:
    """`value` such that DeepSpeed, which puts it between double quotes if it is not plain, pdsh and a shell keep it."""
    return _in_double_quotes(value, '"\\$`').replace("%", "%%")


def argument_for_deepspeed(word: str) -> str:
    """`word`, an argument of the script, such that DeepSpeed, pdsh and a shell keep it.

    DeepSpeed puts words with a blank between double quotes, with a backslash before those in it, and leaves the others.
    """
    return _in_double_quotes(word, "\\$`").replace("%", "%%") if " " in word else for_pdsh(word)


def _in_double_quotes(text: str, special: str) -> str:
    return "".join(f"\\{char}" if char in special else char for char in text)
