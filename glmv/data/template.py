"""From a conversation to token ids and labels, by the checkpoint's own chat template.

The template is rendered twice: once with the texts, once with a marker in place of each. The markers show where every
text stands, so that targets are found by position and never by searching for words. Token ids are those of the text as
a whole, as `tokenizer.apply_chat_template` gives them.

What is learned: the text of every assistant turn, and what follows it up to and including the next role token. GLM has
no end-of-turn token: it stops by opening the next turn, and `<|user|>` is among its `eos_token_id`. Behind the last
turn, where the template writes nothing, `<|user|>` is appended, so that every turn ends in one and the same stop.
Role headers, system and user texts are not learned, unless `train_on_prompt`; image tokens never.
"""
# Shapes: S tokens.

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from glmv.data.dataset import PLACEHOLDER, Conversation, Turn
from glmv.data.errors import DataError
from glmv.data.sample import IGNORED

IMAGE, IMAGE_BEGIN, IMAGE_END, USER = "<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|user|>"

# Private-use characters: no text of a data set holds them between digits in this way.
_MARK = "\ue000{}\ue001"
_MARKS = re.compile("\ue000(\\d+)\ue001")


@dataclass(frozen=True)
class Encoded:
    """A conversation as ids [S] and labels [S], and where its pictures stand: [begin, end) with their brackets."""

    input_ids: list[int]
    labels: list[int]
    image_runs: list[tuple[int, int]]


class ChatTemplate:
    """Tokenizer and chat template of a Hugging Face directory."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = _load_tokenizer(model_dir)
        ids = self.tokenizer.convert_tokens_to_ids([IMAGE, IMAGE_BEGIN, IMAGE_END, USER])
        self.image_id, self.begin_id, self.end_id, self.user_id = ids
        unknown = [name for name, i in zip((IMAGE, IMAGE_BEGIN, IMAGE_END, USER), ids) if i in (None, self._unknown_id)]
        if unknown or not self.tokenizer.chat_template:
            lacks = f"the tokens {', '.join(unknown)}" if unknown else "a chat template (chat_template.jinja)"
            raise DataError(f"{model_dir}: the tokenizer lacks {lacks}.\nUse the directory of a GLM-4.5V checkpoint.")
        added = self.tokenizer.added_tokens_decoder
        # Text that would be read as one of these ids could end a turn, or promise a picture that is not there.
        self.control_tokens = {
            token.content: index
            for index, token in added.items()
            if token.special or re.fullmatch(r"<\|.*\|>", token.content)
        }

    @property
    def pad_token_id(self) -> int:
        """What short samples of a batch are filled up with."""
        return self.user_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id

    @property
    def _unknown_id(self) -> int | None:
        return self.tokenizer.unk_token_id

    def encode(
        self,
        conversation: Conversation,
        image_tokens: Sequence[int],
        *,
        train_on_prompt: bool = False,
        mask_history: bool = False,
    ) -> Encoded:
        """Tokens and labels of a conversation.

        Args:
            image_tokens: how many tokens each picture takes, in the order of their placeholders.
            train_on_prompt: learn everything but image tokens.
            mask_history: learn the last assistant turn only.
        Raises:
            DataError: a control token is typed in a text, or the template does not render every text once.
        """
        self._refuse_control_tokens(conversation)
        text, spans = self._render(self._with_pictures(conversation, image_tokens), conversation.sample_id)
        tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = [*tokens["input_ids"], self.user_id], [*tokens["offset_mapping"], (len(text), len(text))]
        answers = [span for turn, span in zip(conversation.turns, spans) if turn.role == "assistant"]
        learned = set(range(len(ids))) if train_on_prompt else set()
        for begin, end in answers[-1:] if mask_history else answers:
            learned |= self._answer_positions(ids, places, begin, end)
        labels = [i if at in learned and i != self.image_id else IGNORED for at, i in enumerate(ids)]
        begins = [at for at, i in enumerate(ids) if i == self.begin_id]
        ends = [at + 1 for at, i in enumerate(ids) if i == self.end_id]
        return Encoded(ids, labels, list(zip(begins, ends, strict=True)))

    def _answer_positions(self, ids: list[int], places: list[tuple[int, int]], begin: int, end: int) -> set[int]:
        """Tokens that overlap the characters [begin, end), and those behind them up to the next control token."""
        inside = {at for at, (first, last) in enumerate(places) if first < end and last > begin}
        follower = max(inside) + 1
        while ids[follower] not in self.control_tokens.values():
            inside.add(follower)
            follower += 1
        return inside | {follower}

    def _refuse_control_tokens(self, conversation: Conversation) -> None:
        for number, turn in enumerate(conversation.turns):
            typed = [token for token in self.control_tokens if token in turn.text]
            if typed:
                raise DataError(
                    f"{conversation.sample_id}, turn {number}: the text holds {', '.join(typed)}, "
                    "which the tokenizer reads as control tokens.\nWrite it otherwise, or take the sample out."
                )

    def _with_pictures(self, conversation: Conversation, image_tokens: Sequence[int]) -> list[Turn]:
        """Every placeholder replaced by its picture's tokens."""
        runs = iter(f"{IMAGE_BEGIN}{IMAGE * count}{IMAGE_END}" for count in image_tokens)
        return [
            Turn(turn.role, re.sub(re.escape(PLACEHOLDER), lambda _: next(runs), turn.text))
            for turn in conversation.turns
        ]

    def _render(self, turns: Sequence[Turn], sample_id: str) -> tuple[str, list[tuple[int, int]]]:
        """The whole text, and the [begin, end) of every turn's text in it."""
        between = self._between(turns, sample_id)
        # Some templates strip texts; then the stripped ones are what is learned.
        for texts in ([turn.text for turn in turns], [turn.text.strip() for turn in turns]):
            rendered = self._apply([(turn.role, text) for turn, text in zip(turns, texts)], sample_id)
            whole, spans = between[0], []
            for text, literal in zip(texts, between[1:]):
                spans.append((len(whole), len(whole) + len(text)))
                whole += text + literal
            if whole == rendered:
                return whole, spans
        raise DataError(
            f"{sample_id}: the chat template changes the text of a turn, so that its place cannot be known.\n"
            "Take markup that the template acts on (such as think tags) out of the sample."
        )

    def _between(self, turns: Sequence[Turn], sample_id: str) -> list[str]:
        """What the template writes before, between and behind the texts."""
        marked = self._apply([(turn.role, _MARK.format(number)) for number, turn in enumerate(turns)], sample_id)
        parts = _MARKS.split(marked)
        if parts[1::2] != [str(number) for number in range(len(turns))]:
            raise DataError(
                f"{sample_id}: the chat template does not write every turn once and in order.\n"
                "Use the chat_template.jinja of a GLM-4.5V checkpoint."
            )
        return parts[0::2]

    def _apply(self, turns: Sequence[tuple[str, str]], sample_id: str) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        except TemplateError as fault:
            raise DataError(f"{sample_id}: the chat template refuses it: {fault}.\nMend the sample.") from fault


def _load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as fault:
        raise DataError(
            f"{model_dir}: no tokenizer can be read there ({str(fault).splitlines()[0]}).\n"
            "Give data.dataset_param.preprocess_parameters.model_name_or_path a complete Hugging Face directory."
        ) from fault
