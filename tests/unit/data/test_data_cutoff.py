"""What happens to a sample that is longer than `cutoff_len`, or in which nothing is to be learned."""

import logging

import pytest

from glmv.data import DataError

LONG = "a b c d e f g h"


@pytest.fixture
def two_pictures(talk, picture):
    """A sample with 8 picture tokens in its first turn and 8 in its second, between their brackets."""
    names = [picture("p.png", (112, 56)), picture("q.png", (56, 112))]
    return [talk(f"{LONG}<image>?", "yes", "<image>?", LONG, images=names), talk("q", "short")]


def spans(sample, template):
    ids = sample.input_ids.tolist()
    begins = [at for at, i in enumerate(ids) if i == template.begin_id]
    return [(at, ids.index(template.end_id, at) + 1) for at in begins]


def test_text_is_cut_at_the_end(load, talk):
    (whole,) = load([talk("q", LONG)])
    (cut,) = load([talk("q", LONG)], cutoff_len=9)
    assert cut.input_ids.tolist() == whole.input_ids.tolist()[:9]
    assert cut.labels.tolist() == whole.labels.tolist()[:9]
    assert len(cut.mm_token_type_ids) == 9


def test_at_its_very_length_a_sample_stays_whole(load, talk):
    (whole,) = load([talk("q", LONG)])
    (same,) = load([talk("q", LONG)], cutoff_len=len(whole.input_ids))
    assert same.input_ids.tolist() == whole.input_ids.tolist()


def test_a_picture_behind_the_cut_goes_with_its_pixels(load, two_pictures, template):
    whole = load(two_pictures)[0]
    (_, first_end), (second_begin, _) = spans(whole, template)
    assert whole.image_grid_thw.tolist() == [[1, 4, 8], [1, 8, 4]]
    for cut in (second_begin, first_end + 6):
        sample = load(two_pictures, cutoff_len=cut)[0]
        assert sample.image_grid_thw.tolist() == [[1, 4, 8]]
        assert sample.pixel_values.equal(whole.pixel_values[:32])
        assert int(sample.mm_token_type_ids.sum()) == 8


@pytest.mark.parametrize("number", [1, 2])
def test_a_cut_inside_a_picture_drops_the_sample(load, two_pictures, template, number, caplog):
    whole = load(two_pictures)[0]
    begin, end = spans(whole, template)[number - 1]
    for cut in (begin + 1, end - 1):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            samples = load(two_pictures, cutoff_len=cut)
        assert [sample.sample_id for sample in samples] == ["d.json[1]"]
        (record,) = caplog.records
        assert record.message.endswith(
            "d.json: 1 of 2 samples are dropped:\n"
            f"  d.json[0]: cutoff_len = {cut} falls inside picture {number} of 2 "
            f"(tokens {begin} to {end} of {len(whole.input_ids)})"
        )


def test_right_behind_a_picture_the_cut_keeps_it(load, two_pictures, template):
    whole = load(two_pictures)[0]
    _, end = spans(whole, template)[1]
    assert load(two_pictures, cutoff_len=end)[0].image_grid_thw.tolist() == [[1, 4, 8], [1, 8, 4]]


def test_a_sample_without_targets_is_dropped(load, talk):
    samples = load([talk(LONG, "yes"), talk("q", "yes")], cutoff_len=10)
    assert [sample.sample_id for sample in samples] == ["d.json[1]"]
    assert [(each.sample_id, each.reason) for each in samples.dropped] == [
        ("d.json[0]", "nothing is left to learn in its first 10 of 17 tokens")
    ]


@pytest.mark.parametrize("answer", [{"content": ""}, {"content": " \n\t"}, {"content": None}, {}])
def test_a_sample_without_an_answer_is_dropped(load, talk, answer, caplog):
    silent = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **answer}]}
    with caplog.at_level(logging.WARNING):
        samples = load([talk("q", "yes"), silent])
    assert [sample.sample_id for sample in samples] == ["d.json[0]"]
    (record,) = caplog.records
    assert record.message.endswith(
        "d.json: 1 of 2 samples are dropped:\n  d.json[1]: the assistant says nothing in turn 1"
    )


def test_one_empty_answer_of_several_drops_the_sample(load, talk):
    samples = load([talk("q", "yes", "q", ""), talk("q", "yes")])
    assert [each.reason for each in samples.dropped] == ["the assistant says nothing in turn 3"]


def test_data_without_any_answer_stop_the_run(load, talk):
    with pytest.raises(DataError, match=r"2 of 2 samples are dropped:[^$]*None is left to train on. Write answers"):
        load([talk("q", ""), talk("q", " ")])


def test_when_all_are_dropped_the_run_stops(load, talk):
    with pytest.raises(DataError) as caught:
        load([talk("q", "yes")] * 12, cutoff_len=5)
    said = str(caught.value).splitlines()
    assert said[0].endswith("d.json: 12 of 12 samples are dropped:")
    assert len(said) == 1 + 10 + 1 + 1
    assert said[-2] == "  and 2 more"
    assert said[-1].startswith("None is left to train on. ")
    assert said[-1].endswith(" raise cutoff_len or lower image_max_pixels.")
