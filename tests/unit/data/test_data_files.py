"""Data files: what is read, and what is said of what cannot be."""

import json
from pathlib import Path

import pytest

from glmv.data import DataError
from glmv.data.dataset import picture_folder

HELLO = {"messages": [{"role": "user", "content": "Hé 中"}, {"role": "assistant", "content": "yes"}]}


def turns(conversations):
    return [[(turn.role, turn.text) for turn in each.turns] for each in conversations]


LINES = json.dumps(HELLO, ensure_ascii=False)
FORMS = {
    "list": (f"[{LINES}, {LINES}]", "d.json"),
    "list_with_bom": (f"\ufeff[{LINES},\r\n{LINES}]\r\n", "d.json"),
    "lines": (f"{LINES}\n{LINES}\n", "d.jsonl"),
    "lines_named_json": (f"{LINES}\n\n{LINES}\n\n", "d.json"),
    "lines_with_bom_and_crlf": (f"\ufeff{LINES}\r\n\r\n{LINES}\r\n", "d.jsonl"),
}


@pytest.mark.parametrize("form", FORMS)
def test_json_and_json_lines_give_the_same(read, form):
    text, name = FORMS[form]
    found = read(text.encode(), name=name)
    assert turns(found) == [[("user", "Hé 中"), ("assistant", "yes")]] * 2
    assert [each.sample_id for each in found] == [f"{name}[0]", f"{name}[1]"]


def test_a_line_separator_inside_a_text_ends_no_line(read, talk):
    line = json.dumps(talk("a\u2028b", "yes"), ensure_ascii=False).encode()
    assert turns(read(line, name="d.jsonl")) == [[("user", "a\u2028b"), ("assistant", "yes")]]


def test_columns_and_roles_go_by_the_names_of_the_config(read):
    record = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    assert turns(read([record], attr={})) == [[("user", "q"), ("assistant", "a")]]


def test_max_samples_takes_the_first(read, talk):
    found = read([talk(str(i), "yes") for i in range(5)], max_samples=2)
    assert [each.turns[0].text for each in found] == ["0", "1"]


def test_pictures_are_found_in_dataset_dir(read, talk, picture, tmp_path):
    (found,) = read([talk("<image>?", "yes", images=[picture()])])
    assert found.images == (tmp_path / "p.png",)


def test_a_package_can_hold_the_pictures():
    import skimage

    assert picture_folder("package:skimage/data") == Path(skimage.__file__).parent / "data"


@pytest.mark.parametrize(
    ("package", "pip"), [("no_such_package", "no_such_package"), ("sklearn", "scikit-learn"), ("json/x", "json/x")]
)
def test_a_missing_package_is_told_with_its_pip_name(package, pip, monkeypatch):
    monkeypatch.setattr("glmv.data.dataset.find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        picture_folder(f"package:{package}/data")
    assert f"dataset_dir = 'package:{package}/data'" in str(caught.value)
    assert str(caught.value).endswith(f"Install it: pip install {pip.partition('/')[0]}")


def a(role, content):
    return {"role": role, "content": content}


def one(*messages, **more):
    return [HELLO, {"messages": list(messages)} | more]


# What stands in the file, and what is said of it.
FAULTS = {
    "empty": (b"", "d.json: is empty."),
    "blank": (b" \r\n\n", "d.json: is empty."),
    "dict": (b"{}", "d.json: holds one JSON dict where a list of samples should be."),
    "dict_over_lines": (b'{\n "a": 1\n}', "d.json: holds one JSON dict where"),
    "empty_list": (b"[]", "d.json: holds an empty list."),
    "broken_json": (b'[\n{"messages": }]', "d.json, line 2, column 14: not JSON (Expecting value)."),
    "broken_line": (b'{"messages": 1}\n{"messages"', "d.json, line 2, column 12: not JSON"),
    "not_text": (b"\xff\xfe[]", "d.json: not UTF-8 text"),
    "no_object": ([HELLO, 3], "d.json, sample 1: is a JSON int, not an object."),
    "no_messages": (
        [{"conversations": []}],
        "d.json, sample 0: has no turns under 'messages' (its keys: conversations)",
    ),
    "no_turns": (one(), "d.json, sample 1: has no turns under 'messages'"),
    "no_content": (one({"role": "user"}), "sample 1, turn 0: is not an object with 'role' and 'content'."),
    "unknown_role": (
        one(a("bot", "x")),
        "sample 1, turn 0: role = 'bot' is not a known role.\nUse system, user, assist",
    ),
    "null_content": (one(a("user", None)), "sample 1, turn 0: content = None is not a text."),
    "two_users": (one(a("user", "q"), a("user", "q")), "sample 1: the roles are user, user.\nAfter at most one system"),
    "assistant_first": (one(a("assistant", "x"), a("user", "q")), "sample 1: the roles are assistant, user."),
    "user_last": (one(a("user", "q"), a("assistant", "x"), a("user", "q")), "the roles are user, assistant, user."),
    "late_system": (one(a("user", "q"), a("system", "s")), "sample 1: the roles are user, system."),
    "only_system": (one(a("system", "s")), "sample 1: the roles are system."),
    "too_few_pictures": (
        one(a("user", "<image><image>"), a("assistant", "x"), images="p.png"),
        "sample 1: has 2 <image> placeholders and 1 pictures.",
    ),
    "too_many_pictures": (
        one(a("user", "q"), a("assistant", "x"), images=["p.png"]),
        "sample 1: has 0 <image> placeholders and 1 pictures.",
    ),
    "placeholder_in_answer": (
        one(a("user", "q"), a("assistant", "see <image>"), images=["p.png"]),
        "sample 1, turn 1: the assistant holds <image>",
    ),
    "video": (one(a("user", "<video>?"), a("assistant", "x")), "sample 1, turn 0: holds <video>, and video samples"),
    "picture_numbers": (
        one(a("user", "q"), a("assistant", "x"), images=[3]),
        "sample 1: images = [3] is not a list of",
    ),
    "missing_picture": (
        one(a("user", "<image>"), a("assistant", "x"), images=["no/such.png"]),
        "sample 1: there is no picture {tmp_path}/no/such.png.",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_by_file_and_sample(read, picture, tmp_path, fault):
    picture()
    content, said = FAULTS[fault]
    with pytest.raises(DataError) as caught:
        read(content)
    assert said.format(tmp_path=tmp_path) in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/d.json")


def test_a_missing_file_is_told(data_config, tmp_path):
    from glmv.data.dataset import read_conversations

    param = data_config([HELLO], dataset=f"{tmp_path}/gone.json").dataset_param
    with pytest.raises(DataError, match=r"gone.json: no such data file"):
        read_conversations(param)
