"""A byte-level BPE tokenizer for the tiny model: trained here on a page of words, with GLM's special tokens.

Small enough to be readable in the file, complete enough for real clients: reasoning and tool-call markers are single
tokens, and the chat template takes system, tool, thinking and no-thinking turns in GLM's shape.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from glm5deploy.glm_dsa.tokenizer import byte_alphabet

VOCAB_SIZE = 1024

# Ids follow the normal tokens in this order, as in GLM's own vocabulary.
# fmt: off
CONTROL = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>",
    "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>",
)
USER_DEFINED = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
)
# fmt: on

_CORPUS = """
a an the this that these those and or but so if then when where while because before after until with without within
into onto from over under between through across along around near far here there now soon later again always never
often seldom almost enough quite rather very too also only even still yet already not no yes one two three four five
six seven eight nine ten hundred thousand first second third last next each every some any many few more most less
who what which whose how why it its he she we you they them their our your my me us is are was were be been being has
have had do does did can could may might must shall should will would make made take taken give given keep kept find
found hold held bring brought send sent read write written speak spoken think thought know known learn learned teach
build built open close begin end turn move run walk stand sit fall rise grow cut join split merge load store serve
fetch answer ask question word letter line page book paper table chair door window wall floor roof house garden street
bridge river lake island mountain valley forest field road harbour ship boat sail wind rain snow storm cloud sky star
moon sun light dark morning evening night winter spring summer autumn year month week day hour minute moment stone
sand iron copper silver gold glass wood water fire earth air salt bread milk honey apple pear plum tree leaf root seed
flower grass bird fish horse dog cat sheep cow wolf bear fox child mother father sister brother friend teacher doctor
sailor miller baker king queen city village country market music song dance story number weight tensor layer head
token router expert memory engine model signal pattern small large long short high low wide narrow deep quick slow
quiet loud warm cold bright clear heavy soft hard smooth sharp round old new young early late true false
""".split()  # noqa: SIM905 (a page of words reads better than a page of quotes)


@dataclass(frozen=True, slots=True)
class TinyTokenizer:
    """``tokens`` has exactly :data:`VOCAB_SIZE` entries, ``types`` their GGUF types: 1 normal, 3 control, 4
    user-defined, 5 unused. ``words`` are the tokens that are whole words of the corpus."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    words: frozenset[str]

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


def train() -> TinyTokenizer:
    """The same tokenizer on every machine: the corpus is fixed and ties are broken by the pieces themselves."""
    normal = VOCAB_SIZE - 64
    tokens = sorted(byte_alphabet(), key=ord)
    merges: list[str] = []
    # A word after a space, as in running text. Frequency is that of the list: 1.
    words = [("Ġ", *word) for word in dict.fromkeys(_CORPUS)]
    while len(tokens) < normal:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        if not pairs:
            break
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(f"{left} {right}")
        if left + right not in tokens:
            tokens.append(left + right)
        words = [_joined(word, left, right) for word in words]
    types = [1] * len(tokens) + [3] * len(CONTROL) + [4] * len(USER_DEFINED)
    tokens += [*CONTROL, *USER_DEFINED]
    unused = range(len(tokens), VOCAB_SIZE)
    tokens += [f"[PAD{token_id}]" for token_id in unused]
    types += [5 for _ in unused]
    return TinyTokenizer(tuple(tokens), tuple(types), tuple(merges), frozenset(f"Ġ{word}" for word in _CORPUS))


def _joined(word: tuple[str, ...], left: str, right: str) -> tuple[str, ...]:
    pieces: list[str] = []
    for piece in word:
        if piece == right and pieces and pieces[-1] == left:
            pieces[-1] = left + right
        else:
            pieces.append(piece)
    return tuple(pieces)


CHAT_TEMPLATE = """[gMASK]<sop>
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|system|>
# Tools
These functions can be called; each line is one signature in JSON.
<tools>
{% for tool in tools -%}
{{ (tool.function if tool.function else tool) | tojson }}
{% endfor -%}
</tools>
Call one as <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}<|user|>{{ text_of(message.content) }}
{%- elif message.role == 'system' -%}<|system|>{{ text_of(message.content) }}
{%- elif message.role == 'assistant' -%}
<|assistant|>
{%- if message.reasoning_content -%}<think>{{ message.reasoning_content }}{%- endif -%}
</think>{{ text_of(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function else call -%}
<tool_call>{{ function.name }}
{%- for key, value in function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson }}</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
<tool_response>{{ text_of(message.content) }}</tool_response>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif -%}
"""
