"""What a library is made of: named C++ texts, a folder of headers, and compiler flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sennit.errors import BuildUnavailable, InvalidInput

__all__ = ["Source"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Source:
    """The source of one library.

    Attributes:
        name: the library's name, part of file names.
        units: file name and C++ text of every translation unit.
        headers: a folder whose files, in sub-folders too, are on the include path; None where there are none.
        flags: compiler flags behind the usual ones, such as the instruction set.
        purpose: what it is for, where its name does not say so; shown to people, and no part of what it is.
        last_flags: those that must hold whatever the user's own, ``SENNIT_CXXFLAGS``, say; behind all others.

    Raises:
        InvalidInput: a name is not a plain file name, there is no unit, or two have one name.

    >>> Source("hello", units=(("../hello.cpp", "int x;"),), headers=None)
    Traceback (most recent call last):
    ...
    sennit.errors.InvalidInput: units: expected plain file names that end in .cpp, got '../hello.cpp'
    """

    name: str
    units: tuple[tuple[str, str], ...]
    headers: Path | None
    flags: tuple[str, ...] = ()
    purpose: str = field(default="", compare=False)
    last_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidInput("name", expected="letters, digits, '_', '.' and '-'", got=repr(self.name))
        names = [name for name, _ in self.units]
        for name in names:
            if not (NAME.fullmatch(name) and name.endswith(".cpp")):
                raise InvalidInput("units", expected="plain file names that end in .cpp", got=repr(name))
        if not names or len(set(names)) < len(names):
            raise InvalidInput("units", expected="one or more translation units of different names", got=names)
        if self.headers is not None and not self.headers.is_dir():
            raise InvalidInput("headers", expected="an existing folder", got=str(self.headers))

    @classmethod
    def in_folder(
        cls,
        folder: Path,
        name: str,
        files: Sequence[str],
        flags: tuple[str, ...],
        *,
        purpose: str = "",
        last_flags: tuple[str, ...] = (),
    ) -> Source:
        """The source of a library whose units and headers are files of one folder.

        Raises:
            BuildUnavailable: they cannot be read, as where a package is imported from an archive.
        """
        try:
            units = tuple((file, (folder / file).read_text()) for file in files)
        except OSError as error:
            raise BuildUnavailable(f"the C++ source of {name!r} cannot be read: {error}") from error
        return cls(name, units, folder, flags, purpose, last_flags)
