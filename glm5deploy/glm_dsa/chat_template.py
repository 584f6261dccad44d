"""The chat template of a GGUF: untrusted text that will be run as a Jinja program in the server.

It is compiled here, in the sandbox and with the extensions that transformers uses, so that a template which cannot run
is an error now and not at the first request. It is not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm5deploy.errors import FileFormatError
from glm5deploy.glm_dsa.metadata import Metadata, read_string

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

KEY = "tokenizer.chat_template"
LARGEST_TEMPLATE = 1 << 17  # characters; GLM's have about 5,000, and compiling takes time


def read_chat_template(metadata: Metadata) -> str | None:
    """The template, checked to compile; None when the file has none."""
    template = read_string(metadata, KEY)
    if not template:
        return None
    if len(template) > LARGEST_TEMPLATE:
        raise FileFormatError(f"{KEY} has {len(template)} characters, more than the {LARGEST_TEMPLATE} allowed")
    compile_template(template)
    return template


def compile_template(template: str) -> None:
    """Raise :class:`FileFormatError` with the line when ``template`` is not valid Jinja."""
    from jinja2 import TemplateSyntaxError, pass_context

    environment = template_environment()
    # Compiling must not run any of it: Jinja evaluates constant expressions, such as 9**9**9, unless it is told not to
    # optimise and what is printed depends on the context.
    environment.optimized = False
    environment.finalize = pass_context(lambda _, value: value)
    try:
        environment.from_string(template)
    except TemplateSyntaxError as error:
        raise FileFormatError(
            f"{KEY} does not compile, line {error.lineno}: {error.message}",
            hint="Serve with a template of your own (vllm serve --chat-template FILE), or take another file.",
        ) from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        # Python's own limits, met by the code that Jinja makes of the template.
        raise FileFormatError(f"{KEY} nests too deeply to compile") from error


def template_environment() -> ImmutableSandboxedEnvironment:
    """A sandbox that accepts what transformers accepts: loop controls and ``{% generation %}`` blocks."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
