"""The errors a user is meant to read: what is wrong, and what to do next.

Everything that can go wrong for a reason outside the program is raised as a :class:`DeployError`; the command line
prints ``message`` and ``hint`` on one line each and exits with ``exit_code``. Any other exception is a defect here.
"""

from __future__ import annotations

EXIT_INTERRUPTED = 130
"""What a shell gives to a command that Ctrl-C ended."""


class DeployError(Exception):
    """A stage failed for a reason the user can act on.

    ``message`` names the file, offset or setting at fault; ``hint`` is the next step, as a sentence or a command.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DeployError):
    """The command line or the configuration asks for something that cannot be meant."""

    exit_code = 2


class FileFormatError(DeployError):
    """A file is not what its name or its set says it is (GGUF header, shard set, state record)."""


class HubError(DeployError):
    """The hub refused, was unreachable, or served something that does not match its own listing."""


class DiskFullError(DeployError):
    """A file system has too little free space; names the path, the bytes needed and the bytes free."""
