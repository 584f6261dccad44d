"""``python -m glm5deploy.vllm_plugin.headless MODEL …``: ``vllm serve MODEL … --headless`` where that does not start.

The CPU wheel's `vllm` script asks the package metadata for "vllm", which that wheel does not provide, and its server
module knows no headless mode. This takes vLLM's own subcommand by its class instead.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> None:
    """Run vLLM's `serve` subcommand with ``arguments``."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    parsed = parser.parse_args([command.name, *arguments])
    command.validate(parsed)
    command.cmd(parsed)


if __name__ == "__main__":
    main(sys.argv[1:])
