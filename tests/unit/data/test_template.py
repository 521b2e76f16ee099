"""Token ids are the chat template's; labels are found by position."""

import pytest
from transformers import AutoTokenizer

from glmv.data import DataError
from glmv.data.dataset import Conversation, Turn
from glmv.data.template import ChatTemplate

U, A, S = "user", "assistant", "system"
DIALOGUES = {
    "one_turn": [(U, "Hi there"), (A, "yes")],
    "system": [(S, "Be brief."), (U, "Hi"), (A, "yes")],
    "two_turns": [(U, "Hi"), (A, "yes"), (U, "and?"), (A, "no")],
    "three_turns": [(U, "a"), (A, "b"), (U, "c"), (A, "d"), (U, "e"), (A, "f")],
    "spaces": [(U, "  Hi\n"), (A, "\n yes \n")],
    "unicode": [(U, "中文 é 🙂"), (A, "ja, natürlich 🙂")],
    "braces": [(U, "{{ x }} {% if %}"), (A, "{# no #}")],
    "numbers": [(U, "0 1 2"), (A, "\\1 \\g<0>")],
    "thinking": [(U, "Hi"), (A, "<think>hm</think>\nyes")],
    "empty_question": [(U, ""), (A, "yes")],
}


def conversation(dialogue):
    return Conversation("d.json[3]", tuple(Turn(role, text) for role, text in dialogue), ())


def learned(template, dialogue, image_tokens=(), **options):
    """Runs of learned tokens, decoded, a `|` between tokens that do not stand side by side."""
    encoded = template.encode(conversation(dialogue), image_tokens, **options)
    runs, before = [], None
    for at, label in enumerate(encoded.labels):
        if label == -100:
            continue
        assert label == encoded.input_ids[at]
        if before != at - 1:
            runs.append([])
        runs[-1].append(label)
        before = at
    return [template.tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("name", DIALOGUES)
def test_ids_are_those_of_the_checkpoints_template(template, tokenizer, name):
    messages = [{"role": role, "content": text} for role, text in DIALOGUES[name]]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    encoded = template.encode(conversation(DIALOGUES[name]), ())
    assert encoded.input_ids == [*expected, tokenizer.convert_tokens_to_ids("<|user|>")]
    assert len(encoded.labels) == len(encoded.input_ids)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("one_turn", ["yes<|user|>"]),
        ("system", ["yes<|user|>"]),
        ("two_turns", ["yes<|user|>", "no<|user|>"]),
        ("spaces", ["\n yes \n<|user|>"]),
        ("unicode", ["ja, natürlich 🙂<|user|>"]),
        ("thinking", ["<think>hm</think>\nyes<|user|>"]),
    ],
)
def test_answers_and_the_role_token_behind_them_are_learned(template, name, runs):
    said = learned(template, DIALOGUES[name])
    # A newline of the header and one of the answer may be a single token, which then counts as the answer's.
    assert [run.lstrip("\n") for run in said] == [run.lstrip("\n") for run in runs]


def test_two_turns_token_by_token(template, tokenizer):
    encoded = template.encode(conversation(DIALOGUES["two_turns"]), ())
    ids = tokenizer.convert_tokens_to_ids
    user, assistant, newline = ids("<|user|>"), ids("<|assistant|>"), tokenizer("\n")["input_ids"]
    hi, yes, more, no = (tokenizer(text)["input_ids"] for text in ("Hi", "yes", "and?", "no"))
    head = [ids("[gMASK]"), ids("<sop>"), user, *newline, *hi, assistant, *newline]
    middle = [*newline, *more, assistant, *newline]
    assert encoded.input_ids == [*head, *yes, user, *middle, *no, user]
    masked = [-100] * len(head), [-100] * len(middle)
    assert encoded.labels == [*masked[0], *yes, user, *masked[1], *no, user]


def test_answers_are_found_by_position_and_not_by_their_words(template):
    dialogue = [(U, "yes"), (A, "yes"), (U, "yes, yes"), (A, "yes"), (U, "?"), (A, "yes")]
    assert learned(template, dialogue) == ["yes<|user|>"] * 3


def test_mask_history_learns_the_last_turn_and_nothing_else(template):
    dialogue = [(U, "a"), (A, "yes"), (U, "b"), (A, "yes"), (U, "c"), (A, "yes")]
    encoded = template.encode(conversation(dialogue), (), mask_history=True)
    assert learned(template, dialogue, mask_history=True) == ["yes<|user|>"]
    first = next(at for at, label in enumerate(encoded.labels) if label != -100)
    assert template.tokenizer.decode(encoded.input_ids[first:]) == "yes<|user|>"


def test_train_on_prompt_learns_all_but_image_tokens(template):
    dialogue = [(U, "<image>see"), (A, "yes")]
    encoded = template.encode(conversation(dialogue), [6], train_on_prompt=True)
    masked = [at for at, label in enumerate(encoded.labels) if label == -100]
    assert [encoded.input_ids[at] for at in masked] == [template.image_id] * 6


def test_pictures_stand_where_their_placeholders_were(template):
    encoded = template.encode(conversation([(U, "a<image>b<image>"), (A, "yes")]), [2, 3])
    begin, image, end = "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"
    assert template.tokenizer.decode(encoded.input_ids) == (
        f"[gMASK]<sop><|user|>\na{begin}{image * 2}{end}b{begin}{image * 3}{end}<|assistant|>\nyes<|user|>"
    )
    assert [encoded.input_ids[first:last] for first, last in encoded.image_runs] == [
        [template.begin_id, *[template.image_id] * count, template.end_id] for count in (2, 3)
    ]
    assert template.image_id not in encoded.labels


CONTROL = ["<|image|>", "<|begin_of_image|>", "<|user|>", "<|endoftext|>", "<|assistant|>", "[gMASK]", "<sop>"]


@pytest.mark.parametrize("token", CONTROL)
@pytest.mark.parametrize("turn", [0, 1])
def test_a_typed_control_token_is_refused(template, token, turn):
    dialogue = [(U, "see"), (A, "yes")]
    dialogue[turn] = (dialogue[turn][0], f"see {token} here")
    with pytest.raises(DataError) as caught:
        template.encode(conversation(dialogue), ())
    assert str(caught.value).startswith(f"d.json[3], turn {turn}: the text holds {token}, which the tokenizer reads as")


def with_template(tiny_dir, jinja):
    template = ChatTemplate(tiny_dir)
    template.tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    template.tokenizer.chat_template = jinja
    return template


LOOP = "{{% for m in messages %}}{{{{ '<|' + m.role + '|>\n' }}}}{}{{% endfor %}}"


def test_a_template_that_strips_texts_is_followed(tiny_dir):
    template = with_template(tiny_dir, LOOP.format("{{ m.content.strip() }}"))
    encoded = template.encode(conversation([(U, " q "), (A, " yes ")]), ())
    assert template.tokenizer.decode(encoded.input_ids) == "<|user|>\nq<|assistant|>\nyes<|user|>"
    assert learned(template, [(U, " q "), (A, " yes ")]) == ["yes<|user|>"]


def test_what_a_template_writes_behind_an_answer_is_learned(tiny_dir):
    template = with_template(tiny_dir, LOOP.format("{{ m.content + '\\n' }}"))
    assert learned(template, [(U, "q"), (A, "yes"), (U, "q"), (A, "no")]) == ["yes\n<|user|>", "no\n<|user|>"]


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ("{{ m.content.upper() }}", "changes the text of a turn"),
        ("{{ m.content + m.content }}", "does not write every turn once and in order"),
        ("{% if m.role == 'user' %}{{ m.content }}{% endif %}", "does not write every turn once and in order"),
        ("{{ raise_exception('no ' + m.role) }}", "the chat template refuses it: no user."),
    ],
)
def test_a_template_that_hides_where_texts_stand_is_refused(tiny_dir, inside, said):
    template = with_template(tiny_dir, LOOP.format(inside))
    with pytest.raises(DataError) as caught:
        template.encode(conversation([(U, "q"), (A, "yes")]), ())
    assert str(caught.value).startswith("d.json[3]: ")
    assert said in str(caught.value)


def test_a_directory_without_tokenizer_is_told(tmp_path):
    with pytest.raises(DataError) as caught:
        ChatTemplate(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: no tokenizer can be read there")


def test_a_tokenizer_of_another_model_is_told(tiny_dir, monkeypatch):
    monkeypatch.setattr("glmv.data.template.USER", "<|other|>")
    with pytest.raises(DataError, match=r"the tokenizer lacks the tokens <\|other\|>"):
        ChatTemplate(tiny_dir)
