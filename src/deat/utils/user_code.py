"""Objects out of a Python file of the user's, named as `path/to/file.py:NAME`.

Loading runs the file, so it is only for what the user typed, never for what a file or a run folder says.
"""

import hashlib
import sys
import traceback
from collections.abc import Iterable, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from deat.errors import UsageError, unknown_name_error

MODULE_PREFIX = "_deat_file_"
LIBRARY_PACKAGES = ("deat", "torch")
SPEC_HINT = "write it as path/to/file.py:NAME"


def is_file_spec(spec: str) -> bool:
    """Whether the text means an object in a Python file, well formed or not."""
    return spec.endswith(".py") or ".py:" in spec


def hash_code_file(spec: str) -> str:
    """A hash of the file that a spec names, by which a resumed run knows its own code again."""
    file = split_prefixes(split_spec(spec.strip())[0])[1]
    try:
        return hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {file!r} (of {spec!r}): {error.strerror}") from None


def split_prefixes(file: str) -> tuple[str, str]:
    """The prefixes m+ and f+ that stand before a file's path, and the path, which may begin like one."""
    path = file
    while path[:2].lower() in ("m+", "f+") and not Path(path).expanduser().is_file():
        path = path[2:]
    return file[: len(file) - len(path)], path


def load_object(spec: str) -> object:
    """The object NAME of `path/to/file.py:NAME`; the file runs anew on every call."""
    file, name = split_spec(spec)
    if not name.isidentifier():
        raise UsageError(f"{name!r} (of {spec!r}) is not the name of an object: {SPEC_HINT}")
    module = load_module(spec)
    if not hasattr(module, name):
        raise no_such_name_error(file, name, module)
    value: object = getattr(module, name)
    return value


def load_module(spec: str) -> ModuleType:
    """The file of `path/to/file.py:NAME` as a module; it runs anew on every call."""
    file, _ = split_spec(spec)
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError(f"no such file {file!r} (of {spec!r}): check the path; it is taken from {Path.cwd()}")
    return _run_file(path.resolve(), spec)


def get_qualified_name(thing: object) -> tuple[object, object]:
    """Where a function or class was written, by which it is known again when its file or cell is run anew."""
    return getattr(thing, "__module__", None), getattr(thing, "__qualname__", thing)


def find_user_code_line(error: BaseException) -> str | None:
    """The place in a user's own file that an error came out of, if it came through one."""
    frames = [(f.f_globals.get("__name__", ""), f, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [(f.f_code.co_filename, line) for name, f, line in frames if str(name).startswith(MODULE_PREFIX)]
    return f"{own[-1][0]}, line {own[-1][1]}" if own else None


def describe_error(error: BaseException) -> str:
    """An error's kind and words, and the last line of code that it came through which is neither deat's nor torch's."""
    frames = [(f.f_globals.get("__name__", ""), f, line) for f, line in traceback.walk_tb(error.__traceback__)]
    others = [
        (f.f_code.co_filename, line) for name, f, line in frames if str(name).partition(".")[0] not in LIBRARY_PACKAGES
    ]
    place = f" ({others[-1][0]}, line {others[-1][1]})" if others else ""
    return f"{type(error).__name__}: {error}{place}"


class _NoBytecodeLoader(SourceFileLoader):
    """A loader that neither reads nor leaves byte code: a cached one can be as old as a second."""

    def path_stats(self, path: str) -> NoReturn:
        """Say that there is no byte code."""
        raise OSError(path)


def split_spec(spec: str) -> tuple[str, str]:
    """The file and the name of `path/to/file.py:NAME`."""
    file, colon, name = spec.rpartition(":")
    if not colon:
        raise UsageError(f"{spec!r} names no object: {SPEC_HINT}")
    if not file.endswith(".py"):
        raise UsageError(f"{spec!r} does not name a Python file ending in .py: {SPEC_HINT}")
    return file, name


def _run_file(path: Path, spec: str) -> ModuleType:
    """The file as a module, under a private name that cannot hide an installed package."""
    module_name = f"{MODULE_PREFIX}{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    loader = _NoBytecodeLoader(module_name, str(path))
    module_spec = spec_from_loader(module_name, loader)
    assert module_spec is not None
    module = module_from_spec(module_spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what lies beside it; last, so that nothing installed is hidden
    # Dataclasses and pickle look their module up by name while and after the file runs.
    sys.modules[module_name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise UsageError(
            f"{spec!r} failed while its file ran{_error_line(path, error)}: {_format_error(error)}"
        ) from error
    return module


def _error_line(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""


def _format_error(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def no_such_name_error(file: str, name: str, module: ModuleType, other_names: Iterable[str] = ()) -> UsageError:
    """The refusal of a name that a file does not define, with those that it does, and others that mean something."""
    known = [*_public_names(vars(module)), *other_names]
    if not known:
        return UsageError(f"no {name!r} in {file!r}, which defines no names: define it there")
    return unknown_name_error(f"name in {file!r}", name, known)


def _public_names(names: Mapping[str, object]) -> list[str]:
    return [n for n, value in names.items() if not n.startswith("_") and not isinstance(value, ModuleType)]
