"""Find recipes and DeepSpeed JSONs: as given, else among those shipped with the package.

Shipped files lie in the root of a source checkout, or inside the package where it is installed.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from qwen_edit_zero.errors import SettingsError

_PACKAGE = Path(__file__).resolve().parent.parent
DEFAULT_RECIPE = Path("recipes/demo.yaml")
DEFAULT_DEEPSPEED = Path("ds_configs/zero2.json")
_MAX_BYTES = 1 << 20


def shipped_root() -> Path:
    """The folder that holds the shipped `recipes/` and `ds_configs/`."""
    checkout = _PACKAGE.parent
    return checkout if (checkout / "recipes").is_dir() and (checkout / "pyproject.toml").is_file() else _PACKAGE


def shipped(folder: str) -> list[Path]:
    """The shipped files of `recipes` or `ds_configs`, in order of name."""
    return sorted((shipped_root() / folder).glob("*.*"))


def find_file(given: Path, *, kind: str, folder: str) -> Path:
    """Return where `given` is: relative to the working directory first, then among the shipped files.

    Raises SettingsError naming the nearest shipped file if it is nowhere, or if it is not a regular file.
    """
    for candidate in [given] if given.is_absolute() else [given, shipped_root() / given]:
        if candidate.is_dir():
            raise SettingsError(f"{kind} {given} is a folder; name a file")
        if candidate.exists():
            return candidate
    names = [f"{folder}/{path.name}" for path in shipped(folder)]
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"shipped are: {', '.join(names) or 'none'}"
    raise SettingsError(f"{kind} {given} does not exist (working directory: {Path.cwd()}); {hint}")


def read_text(path: Path, *, shown: str) -> str:
    """Return the text of a small UTF-8 file, without a byte order mark.

    Raises SettingsError, naming the file as `shown`, if it cannot be read, is too big to be settings, or is not UTF-8.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise SettingsError(f"{shown} has {size} bytes; that is not a settings file")
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{shown} cannot be read: {error.strerror or error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "; it looks like UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{shown}:{line} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}){hint}; save it as UTF-8"
        ) from None
