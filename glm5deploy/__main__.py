"""Where the command starts, also as ``python -m glm5deploy``: an interrupt while it loads ends it quietly too."""

from __future__ import annotations

import sys

from glm5deploy.errors import EXIT_INTERRUPTED


def main() -> None:
    try:
        from glm5deploy.cli.app import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
