"""What the ring gives CUDA's operators, by their own schemas: on tensors without memory, so that no GPU is needed."""
# Shapes: B batch, N heads, S queries, K keys, D head dim.

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from glmv.ops.attention_block import attend_block, cuda_block, cuda_block_backward

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# Queries, keys and whether the block is causal: the three kinds of block of a ring with chunks of 6.
BLOCKS = {"diagonal": (12, 12, True), "early_keys": (12, 6, False), "late_queries": (6, 12, False)}


class Calls(TorchDispatchMode):
    """Arguments, under the names of the schema, of each call of an operator with attention in its name."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "attention" in str(function):
            arguments = function._schema.arguments
            defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
            given = dict(zip((each.name for each in arguments), args))  # PyTorch leaves out what is the default
            self.seen.append((str(function), defaults | given | (kwargs or {})))
        return function(*args, **(kwargs or {}))


def states(queries=12, keys=12, dtype=torch.bfloat16, dim=16, device="meta"):
    """Query, key and value, with two query heads for each key head."""
    shapes = (2, 4, queries, dim), (2, 2, keys, dim), (2, 2, keys, dim)
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def run(block, dtype=torch.bfloat16):
    """Output and statistics, gradients, and the calls."""
    queries, keys, causal = BLOCKS[block]
    with Calls() as calls:
        given = states(queries, keys, dtype)
        found = cuda_block(*given, causal=causal)
        lse = torch.empty(2, 4, 2, queries, device="meta")[:, :, 1]  # in a ring it is one chunk of a rank's two
        grads = cuda_block_backward(found[0], *given, found[0], lse, causal=causal)
    return found, grads, calls.seen


def choice(implementation="flash", **what):
    """On a GPU that need not be there."""
    with FakeTensorMode():
        return attend_block.choose(*states(**what, device="cuda"), causal=True, implementation=implementation)


def test_both_passes_call_flash_attention():
    name = "aten._scaled_dot_product_flash_attention"
    assert [call for call, _ in run("diagonal")[2]] == [f"{name}.default", f"{name}_backward.default"]


@HALVES
@pytest.mark.parametrize("block", BLOCKS)
def test_statistics_have_a_number_in_fp32_for_each_query_and_no_padding(block, dtype):
    (output, lse), _, _ = run(block, dtype)
    assert (output.shape, output.dtype) == ((2, 4, BLOCKS[block][0], 16), dtype)
    assert (lse.shape, lse.dtype) == (output.shape[:3], torch.float32)


@HALVES
@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_are_those_of_query_key_and_value(block, dtype):
    queries, keys, _ = BLOCKS[block]
    _, grads, _ = run(block, dtype)
    assert [(grad.shape, grad.dtype) for grad in grads] == [
        ((2, heads, length, 16), dtype) for heads, length in ((4, queries), (2, keys), (2, keys))
    ]


@pytest.mark.parametrize("block", BLOCKS)
def test_forward_asks_for_no_dropout_and_the_usual_scale(block):
    given = run(block)[2][0][1]
    tensors = {name: given.pop(name).shape[1:3] for name in ("query", "key", "value")}
    # The scale is 1 / sqrt(D) by default.
    assert given == {"dropout_p": 0.0, "is_causal": BLOCKS[block][2], "return_debug_mask": False, "scale": None}
    assert tensors == {"query": (4, BLOCKS[block][0]), "key": (2, BLOCKS[block][1]), "value": (2, BLOCKS[block][1])}


@pytest.mark.parametrize("block", BLOCKS)
def test_backward_says_the_same_in_its_own_order(block):
    queries, keys, causal = BLOCKS[block]
    given = run(block)[2][1][1]
    said = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
    unpacked = {"cum_seq_q": None, "cum_seq_k": None}
    assert said == {"max_q": queries, "max_k": keys, "dropout_p": 0.0, "is_causal": causal, "scale": None, **unpacked}


def test_backward_gets_what_the_kernel_reads_as_plain_memory():
    given = run("late_queries")[2][1][1]
    assert given["logsumexp"].is_contiguous()
    assert (given["philox_seed"].shape, given["philox_seed"].dtype) == ((2,), torch.uint64)


def test_no_argument_without_a_default_is_left_out():
    for name, given in run("diagonal")[2]:
        schema = getattr(torch.ops.aten, name.split(".")[1]).default._schema
        assert {argument.name for argument in schema.arguments if not argument.has_default_value()} <= given.keys()


@pytest.mark.parametrize(
    "what", [{"dtype": torch.float32}, {"dtype": torch.float64}, {"dim": 12}, {"dim": 264}], ids=str
)
def test_what_the_kernel_does_not_take_goes_by_the_textbook(what):
    assert choice(**what) == choice("eager") == "eager"


@HALVES
@pytest.mark.parametrize("dim", [8, 128, 256])
def test_what_the_kernel_takes_it_gets(dim, dtype):
    assert choice(dim=dim, dtype=dtype) == "cuda"
