"""Coverage-guided fuzzing of the GGUF header reader, for longer than CI has time for.

    pip install atheris
    python scripts/fuzz_header.py -max_total_time=600 [CORPUS_FOLDER]

Any exception but FileFormatError, a run of over 5 s, or more than 512 MB is a finding; libFuzzer writes the input to
`crash-*`. `python scripts/fuzz_header.py --replay FILE...` reads such inputs without atheris. Small sound files are
the seeds: they are written to the corpus folder if it is empty.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def read(data: bytes) -> None:
    """Read a header and decode all of its values; returns or raises FileFormatError."""
    from glm5deploy.gguf_files.header import parse_header

    header = parse_header(lambda at, length: data[at : at + length], len(data), "fuzz")
    dict(header.metadata)
    for tensor in header.tensors:
        assert header.data_start + tensor.offset + tensor.nbytes <= len(data)


def one_input(data: bytes) -> None:
    from glm5deploy.errors import FileFormatError

    try:
        read(data)
    except FileFormatError:
        return


def write_seeds(folder: Path) -> None:
    from tests.support.gguf_factory import Layout, encode, small_model, split_pairs

    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        return
    model = small_model(layers=1, width=32, quant="Q8_0")
    tensors = [t for t in model.tensors if t.type != "Q6_K"][:4]
    for name, data in {
        "whole": encode(model.pairs, tensors, 32),
        "version-2": encode(model.pairs, tensors, 32, Layout(version=2)),
        "aligned": encode((*model.pairs, ("general.alignment", (4, 64))), tensors, 64),
        "shard": encode(split_pairs(1, 3, 9), tensors, 32),
        "header-only": encode((*model.pairs, *split_pairs(0, 3, 9)), (), 32),
    }.items():
        (folder / name).write_bytes(data)


def main() -> None:
    if sys.argv[1:2] == ["--replay"]:
        for name in sys.argv[2:]:
            one_input(Path(name).read_bytes())
        print(f"{len(sys.argv) - 2} inputs read without a finding")
        return
    import atheris

    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    corpus = Path(folders[0]) if folders else Path(tempfile.mkdtemp(prefix="fuzz-header-"))
    write_seeds(corpus)
    arguments = [a for a in sys.argv if a not in folders] + ["-timeout=5", "-rss_limit_mb=512", str(corpus)]
    with atheris.instrument_imports(include=["glm5deploy.gguf_files"]):
        import glm5deploy.gguf_files.header  # noqa: F401
    atheris.Setup(arguments, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
