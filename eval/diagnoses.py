"""The checks of `headstart doctor`, one table: each looks for one culprit of a low acceptance, and brings numbers.

Checks of files come first; the measured ones are not judged on a target or a tokenizer that is not the head's own,
where every reading of the head is equally bad. Each check names its own culprit only.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from drafters.layers import rope_parameters
from drafters.vocabulary import DraftVocabulary
from eval.casework import Case
from eval.conventions import Bedside, same_rope
from eval.patient import HEAD, nearest_rows, with_vocabulary

Verdict = Literal["ok", "note", "wrong", "not judged"]
COVERED, TRUE, FITS, SAME, LOW = 0.9, 0.99, 0.95, 0.05, 1.3
OWN_ANSWERS, SMALL_ROW = 0.5, 0.01

ADVICE = {
    "files": "copy the folder again, or export or save it again; a head whose tensors changed is another head",
    "target_weights": "use the target that the head was trained for, or train on this one (init=HEAD starts from it)",
    "tokenizer": "use the tokenizer that the head was trained with: the same ids must mean the same tokens",
    "chat_template": "serve with the chat template of the training data, or prepare and train with this one",
    "vocabulary_map": "write d2t (int64 offsets: target id = i + d2t[i]) and t2d of the training's draft vocabulary "
    "into model.safetensors; a map of other data needs training anew",
    "features": "capture the features again with this target: headstart prepare",
    "layers": "declare the layers of the best reading (ours: 0 = the first decoder layer's output; vLLM counts blocks "
    "applied, one more), or import with layer_convention; a store of other layers must be captured again",
    "last_state": "train and serve on the same side of the final norm; capture again if the store is wrong",
    "rope": "write the rope of the best reading into the head's config (rope_theta and rope_parameters both)",
    "slot_convention": "declare that of the best reading; a block has K + 1 rows in fill_in, K in anchor_first",
    "mask_token": "declare the mask token of the best reading: the id whose embedding the mask rows had in training",
    "mask": "prepare again: the supervised span begins right after the generation prompt and holds the end of turn",
    "thinking_mode": "ask in the mode of the training data (thinking=...), or prepare and train in the served mode",
    "answers": "let the target write the answers itself: headstart prepare answered_by=target",
    "acceptance": "nothing is wrong with the conventions: train longer, on more of the target's own answers, of the "
    "domains that are asked; see docs/doctor.md",
}


@dataclass(frozen=True)
class Diagnosis:
    """What a check found. evidence: numbers by name."""

    check: str
    verdict: Verdict
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)
    advice: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _is(check: str, wrong: list[str], fine: str, evidence: dict[str, Any], notes: list[str] | None = None) -> Diagnosis:
    """wrong with its lines, else a note with its own, else ok."""
    if wrong:
        return Diagnosis(check, "wrong", "; ".join(wrong), evidence, ADVICE[check])
    if notes:
        return Diagnosis(check, "note", "; ".join(notes), evidence, ADVICE[check])
    return Diagnosis(check, "ok", fine, evidence)


def _unjudged(check: str, why: str) -> Diagnosis:
    return Diagnosis(check, "not judged", why)


def _why_unmeasured(case: Case) -> str:
    if case.patient.drafter is None:
        return "the head could not be built"
    return f"the target's {' and '.join(case.foreign)} are not the head's: every reading is equally bad"


def check_files(case: Case) -> Diagnosis:
    """The folder is whole and every tensor is known."""
    return _is(
        "files", case.patient.about("files"), "config and tensors are whole", {"notes": list(case.patient.notes)}
    )


def check_target_weights(case: Case) -> Diagnosis:
    """The target is the one that the head, and its training data, declare."""
    own, declared = case.target.identity, case.patient.target
    wrong = case.patient.about("target_weights")
    wrong += _differs(case, "weights", "weights")
    evidence = {"target": own["weights"], "declared": declared.get("weights")}
    if wrong:
        evidence |= _tau_of(case)
    if not declared.get("weights"):
        return _is("target_weights", wrong, "", evidence, ["the head does not say which weights it was trained for"])
    return _is("target_weights", wrong, "the weights are those that the head declares", evidence)


def check_tokenizer(case: Case) -> Diagnosis:
    """Ids mean the tokens that they meant in training."""
    wrong = _differs(case, "tokenizer", "tokenizer")
    own, declared = case.target.identity["tokenizer"], case.patient.target.get("tokenizer")
    evidence = {"target": own, "declared": declared}
    if wrong:
        evidence |= _tau_of(case)
    notes = [] if declared else ["the head does not say which tokenizer it was trained with"]
    return _is("tokenizer", wrong, "the tokenizer is the one that the head declares", evidence, notes)


def _differs(case: Case, key: str, word: str) -> list[str]:
    """A line for each part that declares another `key` than the target's own."""
    own, name = case.target.identity[key], case.patient.target.get("name")
    found = []
    if case.patient.target.get(key, own) != own:
        found.append(f"the head is for {name!r} with {word} {case.patient.target[key]}, this target has {own}")
    for part, identity in (case.prepared.identities if case.prepared else {}).items():
        if identity.get(key, own) != own:
            found.append(f"{part} is of {identity.get('name')!r} with {word} {identity[key]}, this target has {own}")
    return found


def _tau_of(case: Case) -> dict[str, Any]:
    tally = case.tally(case.served)
    return {} if tally is None else {"tau": round(tally.tau, 3)}


def check_chat_template(case: Case) -> Diagnosis:
    """Prompts are rendered as the training data were."""
    own = case.target.identity["chat_template"]
    said = case.patient.target.get("chat_template")
    data = case.patient.data.get("prepared", case.patient.data).get("chat_template")
    known = {"the head's target": said, "the head's data": data}
    if case.prepared:
        known["prepare.json"] = case.prepared.summary.get("chat_template")
    other = {part: mark for part, mark in known.items() if mark not in (None, "unknown", own)}
    wrong = [f"{part} had chat template {mark}, this target has {own}" for part, mark in other.items()]
    notes = [] if any(mark not in (None, "unknown") for mark in known.values()) else ["the head does not declare one"]
    return _is("chat_template", wrong, "the chat template is that of training", {"target": own} | known, notes)


def check_vocabulary_map(case: Case) -> Diagnosis:
    """d2t and t2d are there, agree, fit the head, and cover what the target says."""
    patient, wrong = case.patient, case.patient.about("vocabulary_map")
    if patient.drafter is None:
        return _is("vocabulary_map", wrong, "", {}) if wrong else _unjudged("vocabulary_map", _why_unmeasured(case))
    vocabulary = patient.drafter.vocabulary
    answers = [int(token) for one in case.trajectories(case.home) for token in one.tokens[one.prompt :]]
    covered = sum(bool(vocabulary.t2d[token]) for token in answers) / len(answers)
    evidence: dict[str, Any] = {"tokens": len(vocabulary), "of": vocabulary.target_size, "covered": round(covered, 4)}
    if not case.foreign:
        if len(patient.vocabularies) > 1:
            evidence["tau_by_reading"] = {how: round(_tau_with(case, how), 3) for how in patient.vocabularies}
        wrong += _stale_map(case, evidence)
    # On another target, or in other ids, the answers are not those that the map was made for.
    if not wrong and covered < COVERED and not case.foreign:
        wrong = [f"the draft vocabulary holds only {covered:.1%} of the tokens that the target answers with"]
    said = "is the whole vocabulary" if vocabulary.is_full else f"maps {len(vocabulary)} of {vocabulary.target_size}"
    return _is("vocabulary_map", wrong, f"the map {said} and covers {covered:.1%} of the target's answers", evidence)


def _tau_with(case: Case, how: str) -> float:
    beside = case.bedside(case.home)
    assert beside is not None
    drafter = with_vocabulary(case.patient, how, case.target.parts)
    other = Bedside(drafter, beside.parts, beside.trajectories, beside.num_slots, beside.mask_tokens)
    return other.tally(other.declared).tau


def _stale_map(case: Case, evidence: dict[str, Any]) -> list[str]:
    """A map that is consistent and still not the head's: the head's rows lie near other rows of the target's, and
    reading it so accepts more."""
    drafter, parts = case.patient.drafter, case.target.parts
    assert drafter is not None
    head, vocabulary = drafter.state_dict().get(HEAD), drafter.vocabulary
    if head is None or vocabulary.is_full or case.patient.about("vocabulary_map"):
        return []
    near = nearest_rows(head, parts.head)
    if bool((near == vocabulary.ids).all()) or bool((near[1:] <= near[:-1]).any()):
        return []
    how = "the target's rows nearest to the head's"
    case.patient.vocabularies[how] = DraftVocabulary(near, vocabulary.target_size)
    tally, other = case.tally(case.home), _tau_with(case, how)
    assert tally is not None
    evidence["tau_by_reading"] = {"d2t": round(tally.tau, 3), how: round(other, 3)}
    if other < 1.1 * tally.tau:
        return []
    return [f"the map is of other data: tau {tally.tau:.2f} with it, {other:.2f} with {how}"]


def check_features(case: Case) -> Diagnosis:
    """head(last) has the target's own argmax, here and in the store, and the store's tokens are those of the data."""
    wrong, evidence = [], {}
    try:
        evidence["head_of_last"] = round(case.truth, 4)
    except ValueError as error:
        wrong.append(str(error))
    truth = case.store_truth if "weights" not in case.foreign else None
    if truth is not None:
        evidence["store_head_of_last"] = round(truth.last, 4)
        if truth.last < TRUE and truth.normed < TRUE:
            wrong.append(f"head(last) of the store has the target's argmax on {truth.last:.1%} of positions")
    if (
        case.prepared
        and case.prepared.store
        and case.prepared.store.ids != [one.id for one in case.prepared.conversations]
    ):
        wrong.append("the store is not of conversations.jsonl: other conversations, or another order")
    return _is("features", wrong, "head(last) has the target's own argmax", evidence)


def _measured(case: Case, check: str, wrong: list[str], fine: str, notes: list[str] | None = None) -> Diagnosis:
    """A convention's diagnosis, from the search: how the head fits and what is accepted as declared and otherwise."""
    found = case.found
    if found is None:
        return _is(check, wrong, "", {}) if wrong else _unjudged(check, _why_unmeasured(case))
    declared, best = found.declared.words(check), found.best.words(check)
    tau, reached = found.declared_tally.tau, found.best_tally.tau
    tried = {one.value: round(one.cost, 4) for one in found.of(check)[:3]}
    evidence = {"declared": declared, "tau": round(tau, 3), "cost": round(found.declared_fit.mean, 4)}
    evidence["cost_of_others"] = tried
    if best != declared:
        others = sorted({one.name for one in found.taken if one.name != check})
        beside = f" (with {', '.join(others)} changed too)" if others else ""
        before, after = found.declared_fit.mean, found.best_fit.mean
        wrong = [
            *wrong,
            f"declared {declared}: tau {tau:.2f}, {before:.2f} nats a token; read as {best}: tau {reached:.2f}, "
            f"{after:.2f} nats{beside}",
        ]
        evidence |= {"best": best, "tau_of_best": round(reached, 3), "cost_of_best": round(after, 4)}
    return _is(check, wrong, fine, evidence, notes)


def check_layers(case: Case) -> Diagnosis:
    """The layers that the head reads are those that it was trained on, and the store's are what they are called."""
    wrong = case.patient.about("layers")
    truth = case.store_truth if "weights" not in case.foreign else None
    for layer, (best, error, own) in (truth.layers if truth else {}).items():
        if best != layer and own > SAME:
            wrong.append(
                f"the store's layer {layer} is layer {best} of the target (differs by {error:.1%}, not {own:.1%})"
            )
    drafter = case.patient.drafter
    if drafter is not None and not drafter.needs.layers:
        return _is("layers", wrong, "the head reads no captured layer", {})
    return _measured(case, "layers", wrong, "no other layers fit better")


def check_last_state(case: Case) -> Diagnosis:
    """The head gets the state from the side of the final norm that it was trained on."""
    wrong = []
    truth = case.store_truth if "weights" not in case.foreign else None
    if truth and truth.last < TRUE <= truth.normed:
        wrong.append(
            f"the store holds states before the final norm: head(last) has the target's argmax on {truth.last:.1%}, "
            f"head(norm(last)) on {truth.normed:.1%}"
        )
    beside = case.found
    if beside is not None and not beside.of("last_state"):
        return _is("last_state", wrong, "the head does not read the last state", {})
    return _measured(case, "last_state", wrong, "the other side of the final norm does not fit better")


def check_rope(case: Case) -> Diagnosis:
    """The head turns its positions as it did in training."""
    wrong, notes = case.patient.about("rope"), []
    layer = getattr(case.patient.drafter, "layer_config", None)
    own, target = getattr(layer, "rope_parameters", None), rope_parameters(case.target.parts.config)
    if own and not same_rope(own, target):
        notes.append(f"the head's rope {own} is not the target's {target}; no other fits better on these prompts")
    longest, wanted = getattr(layer, "max_position_embeddings", None), case.target.parts.config.max_position_embeddings
    if longest and longest < wanted:
        notes.append(f"the head goes to position {longest}, the target to {wanted}: longer texts accept little")
    return _measured(case, "rope", wrong, "no other rope fits better", notes)


def check_slot_convention(case: Case) -> Diagnosis:
    """Slot k stands for the token k places after the anchor, in the rows that the head was trained with."""
    wrong = case.patient.about("slot_convention")
    found = case.found
    if found is None:
        return _measured(case, "slot_convention", wrong, "")
    shifted = found.best_tally.shifted
    best = max(shifted, key=lambda shift: shifted[shift])
    if best != 0 and shifted[best] > max(2 * shifted[0], shifted[0] + 0.2):
        wrong.append(
            f"first drafts are the token {best:+d} from their place in {shifted[best]:.0%} of rounds, and the token of "
            f"their place in {shifted[0]:.0%}: labels or features were shifted in training"
        )
    made = _measured(case, "slot_convention", wrong, "drafts stand in their places")
    return Diagnosis(made.check, made.verdict, made.text, made.evidence | {"shifted": shifted}, made.advice)


def check_mask_token(case: Case) -> Diagnosis:
    """Mask rows hold the embedding that they had in training."""
    wrong, drafter = case.patient.about("mask_token"), case.patient.drafter
    if drafter is not None and drafter.mask_token is None:
        return _is("mask_token", wrong, "the head has no mask rows", {})
    notes = []
    if drafter is not None and drafter.mask_token is not None and not case.foreign:
        token, rows = drafter.mask_token, case.target.parts.embedding
        if any(token in one.tokens.tolist() for one in case.trajectories(case.home)):
            notes.append(f"mask token {token} stands in the target's texts")
        size = float(rows[token].float().norm() / rows.float().norm(dim=-1).median())
        if size < SMALL_ROW and not drafter.settings().get("block", {}).get("trained_mask"):
            notes.append(f"the embedding of mask token {token} is {size:.1%} of the usual size: mask rows say nothing")
    return _measured(case, "mask_token", wrong, "no other mask token fits better", notes)


def check_mask(case: Case) -> Diagnosis:
    """The supervised spans of the training data are the answers, from behind the generation prompt on."""
    if case.prepared is None:
        return _unjudged("mask", "needs prepared=FOLDER, the data that the head was trained from")
    if "tokenizer" in case.foreign:
        return _unjudged("mask", "the data are of another tokenizer")
    wrong, spans, store = [], case.spans, case.prepared.store
    for index in range(min(8, len(store), len(case.prepared.conversations)) if store is not None else 0):
        assert store is not None
        tokens, turns = store.text(index)
        mine = case.prepared.conversations[index]
        if tokens.tolist() == mine.tokens and turns.tolist() != mine.turns:
            wrong.append(f"the store supervises other tokens of {mine.id} than conversations.jsonl")
            break
    if spans is None:
        return _is("mask", wrong, "the template has no generation prompt to go by", {})
    evidence = {"answers": spans.count, "fits_by_shift": spans.fits, "ended": round(spans.ended, 4)}
    here, best = spans.fits[0], spans.shift
    if here < FITS and best != 0 and spans.fits[best] >= FITS:
        wrong.append(
            f"supervised spans follow the generation prompt in {here:.0%} of {spans.count} answers, and in "
            f"{spans.fits[best]:.0%} when moved by {best:+d}: the mask is shifted by {-best:+d}"
        )
    elif here < FITS:
        wrong.append(f"supervised spans follow the template's generation prompt in {here:.0%} of {spans.count} answers")
    elif spans.ended < FITS:
        wrong.append(f"only {spans.ended:.0%} of {spans.count} supervised spans end with the end of turn or the text")
    return _is("mask", wrong, f"spans follow the generation prompt in {here:.0%} of {spans.count} answers", evidence)


def check_thinking_mode(case: Case) -> Diagnosis:
    """Prompts are asked in the mode of the training data."""
    if case.modes == [None]:
        return _is("thinking_mode", [], "the chat template has no thinking switch", {})
    served, trained = case.served, case.trained
    evidence: dict[str, Any] = {"served": served, "trained": trained}
    wrong, notes = [], []
    if case.patient.drafter is not None and not case.foreign:
        taus = {mode: case.tally(mode) for mode in case.modes}
        evidence["tau_by_mode"] = {str(mode): round(one.tau, 3) for mode, one in taus.items() if one}
    measured = "; ".join(f"tau {tau:.2f} with thinking={mode}" for mode, tau in evidence.get("tau_by_mode", {}).items())
    spans = case.spans
    if trained is None or served is None:
        notes.append(f"the mode of {'the prompts' if served is None else 'the training data'} is not known; {measured}")
    elif trained != served:
        wrong.append(f"trained with thinking={trained}, asked with thinking={served}; {measured}")
    if spans is not None and case.patient.thinking is not None and max(spans.fits.values()) >= FITS:
        evidence["data"] = spans.thinking
        if spans.thinking != case.patient.thinking:
            wrong.append(f"the head declares thinking={case.patient.thinking}, its data have {spans.thinking}")
    return _is("thinking_mode", wrong, f"trained and asked with thinking={served}; {measured}", evidence, notes)


def check_answers(case: Case) -> Diagnosis:
    """The training answers are the target's own words."""
    store = case.prepared.store if case.prepared else None
    if store is None:
        return _unjudged("answers", "needs prepared=FOLDER with features")
    same = total = 0
    for index in range(min(64, len(store))):
        one = store[index]
        inside = one.turns[1:] > 0
        same += int((one.top1[:-1] == one.tokens[1:])[inside].sum())
        total += int(inside.sum())
    share = same / max(1, total)
    notes = [f"only {share:.0%} of the answers' tokens are the target's likeliest: another wrote them"]
    fine = f"{share:.0%} of the answers' tokens are the target's likeliest"
    return _is("answers", [], fine, {"likeliest": round(share, 4)}, notes if share < OWN_ANSWERS else None)


def check_acceptance(case: Case) -> Diagnosis:
    """What the head accepts as it is served."""
    tally = case.tally(case.served)
    if tally is None:
        return _unjudged("acceptance", _why_unmeasured(case))
    text = f"tau {tally.tau:.2f} over {sum(tally.rounds)} rounds"
    evidence = {"tau": round(tally.tau, 4), "accepted": round(tally.tau - 1, 4), "rounds": sum(tally.rounds)}
    return _is("acceptance", [], text, evidence, [text + ": low"] if tally.tau < LOW else None)


CHECKS: dict[str, Callable[[Case], Diagnosis]] = {
    "files": check_files,
    "target_weights": check_target_weights,
    "tokenizer": check_tokenizer,
    "chat_template": check_chat_template,
    "vocabulary_map": check_vocabulary_map,
    "features": check_features,
    "layers": check_layers,
    "last_state": check_last_state,
    "rope": check_rope,
    "slot_convention": check_slot_convention,
    "mask_token": check_mask_token,
    "mask": check_mask,
    "thinking_mode": check_thinking_mode,
    "answers": check_answers,
    "acceptance": check_acceptance,
}


def diagnose(case: Case, watch: Callable[[str], None] | None = None) -> list[Diagnosis]:
    """All checks, in order. watch: told the name of each before it starts."""
    found = []
    for name, check in CHECKS.items():
        if watch is not None:
            watch(name)
        found.append(check(case))
    return found
