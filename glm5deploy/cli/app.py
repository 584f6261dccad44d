"""The Typer application, the one error boundary, and the exit codes.

0 done or up to date · 1 a stage failed · 2 wrong usage · 3 ``status`` found something stale · 130 interrupted
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from glm5deploy import __version__
from glm5deploy.cli.bench import bench
from glm5deploy.cli.chat import chat
from glm5deploy.cli.demo import demo
from glm5deploy.cli.doctor import doctor
from glm5deploy.cli.fetch import fetch, verify
from glm5deploy.cli.inspect import inspect
from glm5deploy.cli.install import install
from glm5deploy.cli.merge import merge
from glm5deploy.cli.patch import patch
from glm5deploy.cli.plan import plan
from glm5deploy.cli.run import run
from glm5deploy.cli.serve import serve
from glm5deploy.cli.server_control import logs, stop
from glm5deploy.cli.session import current_output
from glm5deploy.cli.status import reset, status
from glm5deploy.errors import EXIT_INTERRUPTED, DeployError

app = typer.Typer(
    name="glm5deploy",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def boundary(command: Callable[..., None]) -> Callable[..., None]:
    """The only place that turns errors into messages and exit codes."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except DeployError as error:
            current_output().error(error.message, error.hint, error.exit_code)
            if os.environ.get("GLM5DEPLOY_DEBUG"):
                raise
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            # A disk that fills up or a folder that may not be written is no defect, wherever it is noticed.
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if error.filename is None and not full:
                raise
            hint = "free some space and run it again" if full else "check the path and its rights"
            current_output().error(f"{error.filename or 'writing'}: {error.strerror}", hint, DeployError.exit_code)
            raise typer.Exit(DeployError.exit_code) from error
        except KeyboardInterrupt:
            current_output().error(
                "interrupted", "run the same command again to go on where it stopped", EXIT_INTERRUPTED
            )
            raise typer.Exit(EXIT_INTERRUPTED) from None
        finally:
            current_output().close()

    return guarded


def _version(wanted: bool) -> None:
    if wanted:
        current_output().result({"version": __version__}, f"glm5deploy {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """From split GLM-5 GGUF shards to a tensor-parallel vLLM endpoint with true sparse attention."""


for _command in (
    run,
    fetch,
    verify,
    merge,
    patch,
    install,
    serve,
    stop,
    logs,
    doctor,
    plan,
    inspect,
    bench,
    chat,
    status,
    reset,
    demo,
):
    app.command()(boundary(_command))


def main() -> None:
    """The command line. SIGTERM is handled like Ctrl-C, so that a stage can stop cleanly."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if "--json" not in sys.argv:
        app(prog_name="glm5deploy")
        return
    # Typer words a mistyped option for people; a program that asked for JSON gets its one object all the same.
    try:
        sys.exit(app(prog_name="glm5deploy", standalone_mode=False))
    except typer.TyperException as error:
        current_output(json_mode=True).error(error.format_message(), "see glm5deploy --help", error.exit_code)
        sys.exit(error.exit_code)
