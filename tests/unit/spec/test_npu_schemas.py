"""The contract's signatures are those of the releases; the file that holds them was read out of the wheels."""

import inspect
import zipfile

import pytest
import torch

from glmv.verify.wheel import schemas as extraction
from spec.npu_ops import OPERATORS
from spec.npu_ops.schemas import PINNED, schema, versions

MISSING = inspect.Parameter.empty
ALL = [(version, name) for version, named in versions().items() for name in named]
OLDER_AND_NEWER = [(name, version) for version, name in ALL if name in OPERATORS and version != PINNED]


def parse(name, version=PINNED):
    return torch._C.parse_schema(f"npu::{schema(name, version)}")


def in_schema(argument):
    """(name, keyword-only, default) of a schema's argument."""
    return argument.name, argument.kwarg_only, argument.default_value if argument.has_default_value() else MISSING


def in_signature(parameter):
    return parameter.name, parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter.default


@pytest.mark.parametrize(("version", "name"), ALL)
def test_every_schema_is_one(version, name):
    parsed = parse(name, version)
    assert ".".join(filter(None, (parsed.name.removeprefix("npu::"), parsed.overload_name))) == name


@pytest.mark.parametrize("name", OPERATORS)
def test_a_contract_has_the_releases_signature(name):
    parameters = OPERATORS[name].signature.parameters.values()
    assert list(map(in_signature, parameters)) == list(map(in_schema, parse(name).arguments))


@pytest.mark.parametrize(("name", "version"), OLDER_AND_NEWER)
def test_another_release_takes_the_same_calls(name, version):
    """Positional arguments are only ever appended, keywords only added; whatever was added has a default."""
    ours, theirs = (list(map(in_schema, parse(name, release).arguments)) for release in (PINNED, version))
    shared = {argument[0] for argument in ours} & {argument[0] for argument in theirs}
    for arguments in (ours, theirs):
        added = [argument for argument in arguments if argument[0] not in shared]
        positional = [argument[0] in shared for argument in arguments if not argument[1]]
        assert all(default is not MISSING for _, _, default in added)
        assert positional == sorted(positional, reverse=True)
    assert [a for a in ours if a[0] in shared] == [a for a in theirs if a[0] in shared]


def test_what_the_older_release_lacks_is_known():
    assert OPERATORS.keys() - versions()["2.9.0"].keys() == {
        "npu_ring_attention_update",
        "npu_moe_gating_top_k_backward",
        "npu_moe_token_permute_grad_v2",
        "npu_moe_token_unpermute_grad_v2",
    }


def test_extraction_reads_a_wheel(tmp_path):
    swiglu = "npu_swiglu(Tensor input, int dim=-1) -> Tensor"
    library = f"\0npu::{swiglu}\0{swiglu}\0npu_other(Tensor input) -> Tensor\0npu_swiglu is not one\0".encode()
    wheel = tmp_path / "torch_npu.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch_npu/lib/libtorch_npu.so", library)
        archive.writestr("torch_npu-9.8.7.dist-info/METADATA", "Name: torch_npu\nVersion: 9.8.7\n")
    assert extraction.read_wheel(wheel) == ("9.8.7", {"npu_swiglu": swiglu})


def test_extraction_refuses_two_schemas_of_one_name():
    with pytest.raises(extraction.SchemaError, match="two schemas of npu_swiglu"):
        extraction.schemas_in(b"npu_swiglu(Tensor input) -> Tensor\0npu_swiglu(Tensor x) -> Tensor")


def test_extraction_refuses_another_file(tmp_path):
    (tmp_path / "torch_npu.whl").write_text("no wheel", encoding="utf-8")
    with pytest.raises(extraction.SchemaError, match="not a torch_npu wheel"):
        extraction.read_wheel(tmp_path / "torch_npu.whl")
