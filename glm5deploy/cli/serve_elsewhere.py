"""A server that somebody else keeps: the background, systemd, a container."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Literal

from glm5deploy.cli.session import Session

_AROUND = ("--detach", "--print-unit", "--print-compose", "--json")


def own_arguments() -> tuple[list[str], list[str]]:
    """This command line without what is about how it is run, and what stands after ``--`` (with the dashes)."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    return [word for word in words[:at] if word not in _AROUND], words[at:]


def detach_server(session: Session) -> None:
    """Run the same command in a process of its own, which lives on when this one ends; wait until it is ready."""
    from glm5deploy.server.detach import start_detached

    before, after = own_arguments()
    value = start_detached([*before, "--json", *after], session.workdir / "logs", on_progress=session.output.note)
    session.output.result(value, f"{value['url']}\n{value['curl']}")
    session.output.note(f"glm5deploy logs -f --workdir {session.workdir} shows its log, glm5deploy stop ends it")


def _settings_of_the_shell() -> tuple[tuple[str, str], ...]:
    """The variables that the settings were read from; the key is no setting, and the work folder is an argument."""
    from glm5deploy.config import ENVIRONMENT_PREFIX, SECTIONS

    prefixes = tuple(f"{ENVIRONMENT_PREFIX}{section.upper()}_" for section in SECTIONS)
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(prefixes)))


def _with_workdir(words: list[str], workdir: Path) -> list[str]:
    """The work folder may have been named by a variable of this shell."""
    named = any(word == "--workdir" or word.startswith("--workdir=") for word in words)
    return words if named else [*words, "--workdir", str(workdir)]


def print_deployment(session: Session, kind: Literal["unit", "compose"], config: Path | None = None) -> None:
    """Print this command as a systemd unit or a compose file."""
    import glm5deploy
    from glm5deploy.server.api_key import KEY_VARIABLE
    from glm5deploy.server.model_facts import read_model_facts
    from glm5deploy.server.settings import STOP_GRACE
    from glm5deploy.server.units import Deployment, compose_file, systemd_unit

    before, after = own_arguments()
    serve = session.config.serve
    weights = read_model_facts(session.workdir / "model").weight_files if kind == "compose" else ()
    deployment = Deployment(
        program=str(Path(sys.executable).with_name("glm5deploy")),
        arguments=(*_with_workdir(before, session.workdir), *after),
        directory=Path.cwd(),
        workdir=session.workdir,
        user=getpass.getuser(),
        port=serve.port,
        gpus=serve.tp * serve.pp,
        stop_grace=STOP_GRACE,
        weights=tuple(dict.fromkeys(path.parent for path, _ in weights)),
        config=config.absolute() if config is not None else None,
        environment=_settings_of_the_shell(),
        key_file=serve.api_key_file,
        key_variable=serve.api_key_file is None and bool(os.environ.get(KEY_VARIABLE)),
    )
    sources = Path(glm5deploy.__file__).parents[1]
    here = (sources / "pyproject.toml").is_file()
    source = sources if here else f"glm5deploy=={glm5deploy.__version__}"
    text = systemd_unit(deployment) if kind == "unit" else compose_file(deployment, source)
    session.output.result({kind: text}, text.rstrip("\n"))
