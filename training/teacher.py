"""Whether a store's features can train this drafter with this objective: said before the first step."""

from data.features import FeatureStore
from drafters.contract import Drafter
from training.objectives import Objective


def check_store(
    store: FeatureStore, precision: str | None, drafter: Drafter, objective: Objective, drafts: bool
) -> str:
    """What the store holds, in words. precision: of layers' outputs that was asked for (None: any, declared). drafts:
    whether the drafter is to train on its own drafts. ValueError names what does not fit.
    """
    layout = store.layout
    if precision is not None and precision not in (str(layout.aux), layout.aux.name):
        raise ValueError(
            f"{store.folder} holds layers as {layout.aux}, batch.precision asks for {precision}: prepare again, "
            f"`headstart prepare convert=...`, or batch.precision=null for whatever is there"
        )
    name = type(drafter).__name__
    if layout.last is None:
        objective.check_teacher(layout.topk)
        if drafter.needs.last_hidden or drafter.reads_teacher:
            raise ValueError(
                f"{name} reads the target's last hidden state, {store.folder} holds its {layout.topk} most likely "
                f"tokens: capture with features.topk=0"
            )
        if drafts:
            raise ValueError(f"self-forcing needs the last hidden state, {store.folder} holds top-{layout.topk} tokens")
    if layout.teacher_at == "answers" and drafter.needs.last_hidden:
        raise ValueError(
            f"{name} reads the last hidden state of every token, {store.folder} holds it in answers only: capture with "
            f"features.teacher_at=all"
        )
    return layout.describe()
