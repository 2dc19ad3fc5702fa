"""Loads objects from a Python file of the user, given as `path/to/file.py:NAME`.

Loading runs the file. So a spec must come from the command line or an argument, never from a file or a run folder.
"""

import hashlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from deat.errors import UsageError, unknown_name_error
from deat.utils.user_paths import expand_path

MODULE_PREFIX = "_deat_file_"
"""How the names of modules begin that are made from files of the user."""
LIBRARY_PACKAGES = ("deat", "torch")
_PACKAGE_FOLDER = Path(__file__).parents[1]
SPEC_HINT = "write it as path/to/file.py:NAME"


def accepts_argument(function: Callable[..., object], name: str) -> bool:
    """Return whether a function of the user's, or an object that is called, has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # Python knows no signature of some built-in functions
        return False


def is_file_spec(spec: str) -> bool:
    """Return whether a text is meant as an object in a Python file, even if its form is wrong."""
    return spec.endswith(".py") or ".py:" in spec


def hash_code_file(spec: str) -> str:
    """Hash the file that a spec names, so that a resumed run can detect that its code changed.

    Args:
        spec: `path/to/file.py:NAME`, possibly with prefixes of methods.

    Returns:
        The SHA-256 of the file.

    Raises:
        UsageError: If the spec has another form, or the file cannot be read.
    """
    file = split_prefixes(split_spec(spec.strip())[0])[1]
    try:
        return hashlib.sha256(expand_path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {file!r} (in {spec!r}): {error.strerror}") from None


def split_prefixes(file: str) -> tuple[str, str]:
    """Split prefixes of methods, such as m+, from a path.

    Args:
        file: A path, possibly with prefixes. A path that exists may begin like a prefix.

    Returns:
        The prefixes and the path.
    """
    path = file
    while (prefix := re.match(r"[A-Za-z]{1,3}\+", path)) and not expand_path(path).is_file():
        path = path[prefix.end() :]
    return file[: len(file) - len(path)], path


def load_object(spec: str) -> object:
    """Load the object that a spec names. Its file runs again in every call.

    Args:
        spec: `path/to/file.py:NAME`.

    Returns:
        The object.

    Raises:
        UsageError: If the spec has another form, the file is missing or fails, or it does not define the name.

    Example:
        >>> network_class = load_object("my_net.py:Net")
    """
    file, name = split_spec(spec)
    if not name.isidentifier():
        raise UsageError(f"{name!r} (in {spec!r}) is not the name of an object: {SPEC_HINT}")
    module = load_module(spec)
    if not hasattr(module, name):
        raise no_such_name_error(file, name, module)
    value: object = getattr(module, name)
    return value


def load_module(spec: str) -> ModuleType:
    """Load the file that a spec names as a module. It runs again in every call.

    Args:
        spec: `path/to/file.py:NAME`.

    Returns:
        The module.

    Raises:
        UsageError: If the spec has another form, or the file is missing or fails.
    """
    file, _ = split_spec(spec)
    path = expand_path(file)
    if not path.is_file():
        raise UsageError(f"no such file {file!r} (in {spec!r}): check the path, which is relative to {Path.cwd()}")
    return _run_file(path.resolve(), spec)


def get_qualified_name(definition: object) -> tuple[object, object]:
    """Return the module and the name of a function or class, which are the same after its file or cell runs again."""
    return getattr(definition, "__module__", None), getattr(definition, "__qualname__", definition)


def find_user_code_line(error: BaseException) -> str | None:
    """Return the last line of a user's file in the traceback of an error, or None if there is none."""
    return _last_line(error, lambda module: module.startswith(MODULE_PREFIX))


def describe_error(error: BaseException) -> str:
    """Describe an error by its class, its message, and the last line of its traceback outside deat and torch."""
    line = _last_line(error, lambda module: module.partition(".")[0] not in LIBRARY_PACKAGES)
    return f"{type(error).__name__}: {error}" + (f" ({line})" if line else "")


def describe_error_with_line(error: BaseException) -> str:
    """Describe an error by its class, the first line of its message, and the file and line that it comes from.

    Args:
        error: The error.

    Returns:
        Such as "ValueError: boom (my_method.py, line 12)". The line is the last one of the user's own code; without
        one the last line of deat, or of any code.
    """
    message = next(iter(str(error).strip().splitlines()), "")
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    candidates = (_is_user_file, lambda file: file.is_relative_to(_PACKAGE_FOLDER), lambda file: True)
    chosen = next((at for is_wanted in candidates for at in reversed(frames) if is_wanted(at[0])), None)
    line = f" ({_shorten_path(chosen[0])}, line {chosen[1]})" if chosen else ""
    return f"{type(error).__name__}{': ' if message else ''}{message}{line}"


def _is_user_file(file: Path) -> bool:
    """Return whether a file of code is neither deat's, nor Python's, nor an installed package's."""
    libraries = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    installed = (_PACKAGE_FOLDER, *map(Path, libraries))
    is_library = file.name.startswith("<") or {"site-packages", "dist-packages"} & set(file.parts)
    return not is_library and not any(file.is_relative_to(folder) for folder in installed)


def _shorten_path(file: Path) -> Path:
    """Return a path relative to the working folder if it is inside."""
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def _last_line(error: BaseException, is_wanted: Callable[[str], bool]) -> str | None:
    """Return the last line of an error's traceback in a module with a wanted name."""
    lines = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_wanted(str(frame.f_globals.get("__name__", "")))
    ]
    return lines[-1] if lines else None


class _NoBytecodeLoader(SourceFileLoader):
    """A loader without byte code, whose cache does not notice a file that is edited twice in a second."""

    def path_stats(self, path: str) -> NoReturn:
        """Raise an OSError, after which Python neither reads nor writes byte code."""
        raise OSError(path)


def split_spec(spec: str) -> tuple[str, str]:
    """Split a spec into its file and its name.

    Args:
        spec: `path/to/file.py:NAME`.

    Returns:
        The file and the name.

    Raises:
        UsageError: If the spec has another form.
    """
    file, colon, name = spec.rpartition(":")
    if not colon:
        raise UsageError(f"{spec!r} names no object: {SPEC_HINT}")
    if not file.endswith(".py"):
        raise UsageError(f"{spec!r} does not name a Python file ending in .py: {SPEC_HINT}")
    return file, name


def _run_file(path: Path, spec: str) -> ModuleType:
    """Run a file as a module whose name cannot hide an installed package."""
    module_name = f"{MODULE_PREFIX}{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    loader = _NoBytecodeLoader(module_name, str(path))
    module_spec = spec_from_loader(module_name, loader)
    assert module_spec is not None
    module = module_from_spec(module_spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for imports from its folder; last, so as not to hide packages
    # Dataclasses and pickle look up their module by name while the file runs and later.
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
    """Make the error for a name that a file does not define.

    Args:
        file: The file.
        name: The name.
        module: The module made from the file, whose names are suggested.
        other_names: Further names to suggest.

    Returns:
        The error, to be raised.
    """
    known = [*_public_names(vars(module)), *other_names]
    if not known:
        return UsageError(f"no {name!r} in {file!r}, which defines no names: define it there")
    return unknown_name_error(f"name in {file!r}", name, known)


def _public_names(names: Mapping[str, object]) -> list[str]:
    return [n for n, value in names.items() if not n.startswith("_") and not isinstance(value, ModuleType)]
