"""`data`: where the samples are, how they become tokens and pixels, and in what order they are read."""

from typing import Literal

from pydantic import model_validator

from glmv.config.section import Count, Positive, Section, Step


class AttributeNames(Section):
    """`data.dataset_param.attr`: what the data file calls its columns and roles."""

    images: str | None = None
    """Column with the list of picture paths."""
    videos: str | None = None
    """Column with the list of video paths."""
    messages: str = "conversations"
    """Column with the list of turns."""
    role_tag: str = "from"
    """Key of a turn that holds the role."""
    content_tag: str = "value"
    """Key of a turn that holds the text."""
    user_tag: str = "human"
    """The user's role."""
    assistant_tag: str = "gpt"
    """The assistant's role."""
    system_tag: str = "system"
    """The role of an opening system turn."""


class PreprocessParameters(Section):
    """`data.dataset_param.preprocess_parameters`: tokenizer, and budgets of pictures and videos."""

    model_name_or_path: str
    """Hugging Face directory with tokenizer, chat template and image processor; they must be the checkpoint's own."""
    trust_remote_code: bool = False
    """Accepted because published configs carry it; glmv never runs code from a checkpoint."""
    use_fast_tokenizer: bool = True
    """Use the tokenizers library."""
    split_special_tokens: bool = False
    """Read special tokens typed in a text as plain text; false refuses such a text."""
    image_max_pixels: Count = 768 * 768
    """Pictures with more pixels are made smaller."""
    image_min_pixels: Step = 32 * 32
    """Pictures with fewer pixels are made larger."""
    video_max_pixels: Count = 256 * 256
    """Video frames with more pixels are made smaller."""
    video_min_pixels: Step = 16 * 16
    """Video frames with fewer pixels are made larger."""
    video_fps: Positive = 2.0
    """Frames that are read per second of a video."""
    video_maxlen: Count = 128
    """Most frames that are read from a video."""

    @model_validator(mode="after")
    def _budgets_are_ranges(self) -> "PreprocessParameters":
        for kind in ("image", "video"):
            low, high = getattr(self, f"{kind}_min_pixels"), getattr(self, f"{kind}_max_pixels")
            if low > high:
                raise ValueError(f"{kind}_min_pixels = {low} must not be larger than {kind}_max_pixels = {high}")
        return self


class BasicParameters(Section):
    """`data.dataset_param.basic_parameters`: the data files, and what of them is learned."""

    cutoff_len: Count = 1024
    """Most tokens of a sample."""
    template: str = "glm4v_moe"
    """Chat format; `glm4v_moe` is the checkpoint's own chat template."""
    train_on_prompt: bool = False
    """Learn the user's turns too."""
    mask_history: bool = False
    """Learn the last assistant turn only."""
    dataset_dir: str = "data"
    """Directory that picture paths are relative to; `package:NAME/SUB` means a directory of a Python package."""
    dataset: str
    """Data file, JSON or JSON Lines; several are separated by commas."""
    cache_dir: str | None = None
    """Directory for preprocessed samples."""
    overwrite_cache: bool = False
    """Preprocess again although a cache exists."""
    preprocessing_batch_size: Count = 1000
    """Samples per unit of preprocessing work."""
    preprocessing_num_workers: Count | None = None
    """Processes that preprocess."""
    max_samples: Count | None = None
    """Use the first so many samples only."""

    @model_validator(mode="after")
    def _one_set_of_targets(self) -> "BasicParameters":
        if self.train_on_prompt and self.mask_history:
            raise ValueError("train_on_prompt = true and mask_history = true exclude each other.\nTurn one of them off")
        return self


class DatasetParam(Section):
    """`data.dataset_param`."""

    dataset_type: str
    """Kind of data set; `huggingface` is a JSON file of conversations."""
    attr: AttributeNames = AttributeNames()
    """Names of columns and roles."""
    preprocess_parameters: PreprocessParameters
    """Tokenizer and budgets."""
    basic_parameters: BasicParameters
    """Files and targets."""


class CollateParam(Section):
    """`data.dataloader_param.collate_param`."""

    collator_id: Literal["qwen3vl"] = "qwen3vl"
    """How samples become a batch; the published name of the one collator."""
    ignore_pad_token_for_loss: bool = True
    """Padding is never a target."""


class DataloaderParam(Section):
    """`data.dataloader_param`."""

    pin_memory: bool
    """Put batches in page-locked memory."""
    shuffle: bool
    """Draw a new order of samples in every epoch."""
    dataloader_mode: Literal["sampler"]
    """Batches come from a sampler."""
    drop_last: bool
    """Leave out the samples at an epoch's end that do not fill a global batch."""
    sampler_type: Literal["BaseRandomBatchSampler"]
    """The sampler."""
    num_workers: Step = 2
    """Processes that prepare batches."""
    collate_param: CollateParam = CollateParam()
    """Collator."""
    enable_preload: bool = False
    """Prepare the next batch while a step runs."""


class DataConfig(Section):
    """`data`."""

    dataset_param: DatasetParam
    """Samples."""
    dataloader_param: DataloaderParam
    """Batches."""
