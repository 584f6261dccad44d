"""Where the reference models are: the set in the repository, and all sets where the shared data are laid out.

Set A travels with every clone. The other sets are larger and are read from ``GLM5DEPLOY_TEST_DATA`` or from
``shared/data/tiny-glm5`` beside the checkout; a test that needs them fails, with this explanation, where they are not.
"""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SET_A = REPOSITORY / "tests" / "data" / "tiny-glm5"


def tiny_glm5() -> Path:
    """The folder with all reference sets; ``FileNotFoundError`` says how to provide it."""
    named = os.environ.get("GLM5DEPLOY_TEST_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data" / "tiny-glm5"
    if not (folder / "manifest.json").is_file():
        raise FileNotFoundError(
            f"reference models not found in {folder}; set GLM5DEPLOY_TEST_DATA to the folder that holds "
            "manifest.json, GLM-tiny-A-GGUF and GLM-tiny-B-GGUF"
        )
    return folder
