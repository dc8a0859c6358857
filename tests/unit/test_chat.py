"""The loss mask, written out by hand for templates that behave and templates that do not."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.chat import Chat, Template, TemplateError, check_messages, recorded

# One token a word. Special: <s> 0, </s> 1, <e> 2. "\n" is a token of its own, so glue can be seen.
WORDS = ["<s>", "</s>", "<e>", "\n", "user", "assistant", ":", "hi", "yo", "a", "b", "c", "d", "<think>", "</think>"]
WORDS += ["HI", "YO", "A", "system", "be", "x", "[A]", "[U]", "?"]
ID = {word: index for index, word in enumerate(WORDS)}

PLAIN = (
    "{{ '<s> ' }}{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' <e> \n ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(ID, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="?")
    made.add_special_tokens({"additional_special_tokens": ["<e>"]})
    made.chat_template = template
    return made


def ids(text: str) -> list[int]:
    return [ID[word] for word in text.replace("\n", "N").split() for word in [word.replace("N", "\n")]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str, **more: str) -> dict[str, str]:
    return {"role": "assistant", "content": text, **more}


def test_two_turns_by_hand() -> None:
    chat = Template(tokenizer(PLAIN)).chat([user("hi"), answer("a b"), user("yo"), answer("c")])
    assert chat.tokens == ids("<s> user : hi <e> \n assistant : a b <e> \n user : yo <e> \n assistant : c <e> \n")
    #                          <s> user : hi <e> \n asst : a  b <e> \n user : yo <e> \n asst : c <e> \n
    assert chat.turns == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 0]


@pytest.mark.parametrize("markers", [("[U]", "[A]"), ("user :", "assistant :"), ("system [U]", "system [A] :")])
def test_header_markers_are_never_searched_for(markers: tuple[str, str]) -> None:
    ask, reply = markers
    template = (
        f"{{% for m in messages %}}{{{{ ('{ask} ' if m['role'] == 'user' else '{reply} ') + m['content'] }}}}"
        f"{{{{ ' </s> ' }}}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{reply} ' }}}}{{% endif %}}"
    )
    # the user's text holds the assistant's marker: a search for it would go astray
    chat = Template(tokenizer(template)).chat([user(f"hi {reply} x"), answer("a b c"), user("yo"), answer("d")])
    assert [t for t, turn in zip(chat.tokens, chat.turns, strict=True) if turn == 1] == ids("a b c </s>")
    assert [t for t, turn in zip(chat.tokens, chat.turns, strict=True) if turn == 2] == ids("d </s>")


SWITCH = (
    "{% for m in messages %}{{ m['role'] + ' : ' }}{% set why = m.get('reasoning_content') %}"
    "{% if m['role'] == 'assistant' and not why and loop.last %}{{ '<think> </think> ' }}"
    "{% elif why %}{{ '<think> ' + why + ' </think> ' }}{% endif %}"
    "{{ m['content'] + ' <e> ' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think> </think> ' }}{% endif %}{% endif %}"
)


def test_empty_think_block_of_the_generation_prompt_is_not_supervised() -> None:
    chat = Template(tokenizer(SWITCH), thinking=False).chat([user("hi"), answer("a b")])
    assert chat.tokens == ids("user : hi <e> assistant : <think> </think> a b <e>")
    assert chat.turns == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_empty_think_block_in_the_wrong_mode_is_refused() -> None:
    for thinking in (None, True):
        with pytest.raises(TemplateError, match="turn 1: the chat template does not show the answer.*thinking"):
            Template(tokenizer(SWITCH), thinking).chat([user("hi"), answer("a b")])


def test_reasoning_is_supervised_whole() -> None:
    chat = Template(tokenizer(SWITCH), thinking=True).chat([user("hi"), answer("c", reasoning_content="a b")])
    assert chat.tokens == ids("user : hi <e> assistant : <think> a b </think> c <e>")
    assert chat.turns == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    inline = Template(tokenizer(PLAIN)).chat([user("hi"), answer("<think> a b </think> c")])
    assert inline.turns[8:] == [1, 1, 1, 1, 1, 1, 0]


def test_thinking_choice_needs_a_switch() -> None:
    field = PLAIN.replace("m['content']", "m.get('thinking', '') + m['content']")  # a message's field is no switch
    for template in (PLAIN, field):
        with pytest.raises(TemplateError, match="no thinking switch"):
            Template(tokenizer(template), thinking=False)


STRIPPING = (
    "{% for m in messages %}{{ m['role'] + ' : ' }}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think> ')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ ' <e> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
THREE_TURNS = [
    user("hi"), answer("<think> a </think> b"), user("yo"), answer("<think> b </think> c"),
    user("x"), answer("<think> c </think> d"),
]  # fmt: skip


def test_rewritten_history_is_refused_and_names_the_turn() -> None:
    with pytest.raises(TemplateError, match="rewrites history: turn 1,.*multi_turn=split"):
        Template(tokenizer(STRIPPING)).chat(THREE_TURNS)


def test_split_turns_give_every_answer_of_a_template_that_rewrites_history() -> None:
    chats = Template(tokenizer(STRIPPING)).split(THREE_TURNS)
    assert chats[0] == Chat(ids("user : hi <e> assistant : <think> a </think> b <e>"), [0] * 6 + [1] * 5)
    assert chats[1].tokens == ids("user : hi <e> assistant : b <e> user : yo <e> assistant : <think> b </think> c <e>")
    assert chats[1].turns == [0] * 14 + [1] * 5
    assert chats[2].turns == [0] * 22 + [1] * 5


def test_history_without_thinking_is_joined() -> None:
    chat = Template(tokenizer(STRIPPING)).chat([user("hi"), answer("a"), user("yo"), answer("b")])
    assert chat.turns == [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 2, 2]


def test_trimmed_text_keeps_the_right_mask() -> None:
    trimming = PLAIN.replace("m['content']", "m['content'] | trim")
    chat = Template(tokenizer(trimming)).chat([user(" hi  "), answer("  a b ")])
    assert chat.tokens == ids("<s> user : hi <e> \n assistant : a b <e> \n")
    assert chat.turns == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]


def test_upper_cased_answer_is_refused_upper_cased_question_is_not() -> None:
    shouting = PLAIN.replace("m['content']", "(m['content'] if loop.index < 4 else m['content'] | upper)")
    with pytest.raises(TemplateError, match=r"turn 2: .*message 'b', rendered 'B"):
        Template(tokenizer(shouting)).chat([user("hi"), answer("a"), user("yo"), answer("b")])
    asked = PLAIN.replace("m['content']", "(m['content'] | upper if m['role'] == 'user' else m['content'])")
    chat = Template(tokenizer(asked)).chat([user("hi"), answer("a")])
    assert chat.tokens == ids("<s> user : HI <e> \n assistant : a <e> \n")
    assert chat.turns == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]


def test_text_added_before_the_end_of_turn_is_refused() -> None:
    signed = PLAIN.replace("' <e> \n '", "(' x' if m['role'] == 'assistant' else '') + ' <e> \n '")
    assert signed != PLAIN
    with pytest.raises(TemplateError, match="turn 1"):
        Template(tokenizer(signed)).chat([user("hi"), answer("a")])


def test_prompt_that_is_no_prefix_is_refused() -> None:
    moved = "{{ 'system : be <e> ' if add_generation_prompt else '' }}" + PLAIN
    with pytest.raises(TemplateError, match="turn 1: the prompt's rendering is not a prefix"):
        Template(tokenizer(moved)).chat([user("hi"), answer("a")])


def test_one_bos_only() -> None:
    chat = Template(tokenizer(PLAIN)).chat([user("hi"), answer("a")])
    assert chat.tokens.count(ID["<s>"]) == 1
    assert Template(tokenizer(PLAIN)).prompt([user("hi")]).count(ID["<s>"]) == 1
    with pytest.raises(TemplateError, match="two BOS"):
        Template(tokenizer("{{ '<s> ' }}" + PLAIN)).chat([user("hi"), answer("a")])


def test_nothing_after_the_end_of_turn_is_supervised() -> None:
    doubled = PLAIN.replace(" <e> \n ", " <e> </s> \n ")
    chat = Template(tokenizer(doubled)).chat([user("hi"), answer("a")])
    assert chat.tokens == ids("<s> user : hi <e> </s> \n assistant : a <e> </s> \n")
    assert chat.turns == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0]


def test_template_without_end_of_turn_supervises_the_answer_alone() -> None:
    bare = (
        "{% for m in messages %}{{ ('[U] ' if m['role'] == 'user' else '[A] ') + m['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[A] ' }}{% endif %}"
    )
    chat = Template(tokenizer(bare)).chat([user("hi"), answer("a b"), user("yo"), answer("c")])
    assert chat.turns == [0, 0, 0, 1, 1, 0, 0, 0, 2]


def test_every_cut_keeps_each_tokens_owner() -> None:
    messages = [user("hi"), answer("a b"), user("yo"), answer("c")]
    whole = Template(tokenizer(PLAIN)).chat(messages)
    by_hand = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 0]
    for length in range(len(by_hand) + 2):
        chat = Template(tokenizer(PLAIN)).chat(messages)
        assert chat.truncate(length) == (length < len(by_hand))
        assert chat.turns == by_hand[:length]
        assert chat.tokens == whole.tokens[:length]


def test_recorded_ids_are_used_as_they_are() -> None:
    chat = recorded([0, 4, 6], [9, 10, 2])
    assert chat == Chat([0, 4, 6, 9, 10, 2], [0, 0, 0, 1, 1, 1])
    assert chat.prompt_and_answer() == ([0, 4, 6], [9, 10, 2])


def test_bad_messages_are_named() -> None:
    with pytest.raises(ValueError, match="message 1: role must be one of .*got 'gpt'"):
        check_messages([user("hi"), {"role": "gpt", "content": "a"}])
    with pytest.raises(ValueError, match="message 0: content must be text, got NoneType"):
        check_messages([{"role": "user", "content": None}])
    bare = tokenizer(PLAIN)
    bare.chat_template = None
    with pytest.raises(TemplateError, match="no chat template"):
        Template(bare)


def test_template_exceptions_become_refusals() -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + PLAIN
    with pytest.raises(TemplateError, match="refuses this chat of 1 messages: user first"):
        Template(tokenizer(strict)).chat([answer("a")])
