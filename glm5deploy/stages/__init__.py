"""The five stages, thin: inputs, outputs, run. The work is in the packages below them."""

from __future__ import annotations

from glm5deploy.pipeline.stage import Stage

ORDER = ("fetch", "merge", "patch", "install", "serve")


def all_stages(*replacements: Stage) -> list[Stage]:
    """The stages in order, each with default options unless one of ``replacements`` has its name."""
    from glm5deploy.stages.fetch import FetchStage
    from glm5deploy.stages.install import InstallStage
    from glm5deploy.stages.merge import MergeStage
    from glm5deploy.stages.patch import PatchStage
    from glm5deploy.stages.serve import ServeStage

    given = {stage.name: stage for stage in replacements}
    default: list[Stage] = [FetchStage(), MergeStage(), PatchStage(), InstallStage(), ServeStage()]
    return [given.get(stage.name, stage) for stage in default]
