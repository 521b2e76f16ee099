"""`glmv convert hf-to-dcp` and `glmv convert dcp-to-hf`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from glmv.checkpoint.report import Progress, Report

convert_app = typer.Typer(
    help="Convert between Hugging Face directories and training checkpoints.", no_args_is_help=True
)

HfDir = Annotated[Path, typer.Option(help="Hugging Face directory: config.json, safetensors, tokenizer, ...")]
SaveDir = Annotated[Path, typer.Option(help="Where to write.")]
DcpPrefix = Annotated[str, typer.Option(help="Put before every name in the checkpoint; empty for glmv train.")]
HfPrefix = Annotated[str, typer.Option(help="Taken off the names of the Hugging Face directory; normally empty.")]


@convert_app.command("hf-to-dcp")
def hf_to_dcp_command(hf_dir: HfDir, save_dir: SaveDir, dcp_prefix: DcpPrefix = "", hf_prefix: HfPrefix = "") -> None:
    """Make SAVE_DIR/release, to train from (training.load: SAVE_DIR)."""
    from glmv.checkpoint.hf_to_dcp import hf_to_dcp

    with _progress_bar("hf-to-dcp") as progress:
        report = hf_to_dcp(hf_dir, save_dir, dcp_prefix=dcp_prefix, hf_prefix=hf_prefix, progress=progress)
    _tell("hf-to-dcp", report)


@convert_app.command("dcp-to-hf")
def dcp_to_hf_command(
    dcp_dir: Annotated[Path, typer.Option(help="Checkpoint root (its tracker chooses), or one of its iterations.")],
    save_dir: SaveDir,
    hf_dir: Annotated[
        Path | None, typer.Option(help="Take configs and tokenizer from here instead of from the checkpoint.")
    ] = None,
    dcp_prefix: DcpPrefix = "",
    hf_prefix: HfPrefix = "",
) -> None:
    """Export a checkpoint as a Hugging Face directory, in the dtypes and shards of the original."""
    from glmv.checkpoint.dcp_to_hf import dcp_to_hf

    with _progress_bar("dcp-to-hf") as progress:
        report = dcp_to_hf(
            dcp_dir, save_dir, hf_dir=hf_dir, dcp_prefix=dcp_prefix, hf_prefix=hf_prefix, progress=progress
        )
    _tell("dcp-to-hf", report)


@contextmanager
def _progress_bar(title: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _tell(title: str, report: Report) -> None:
    rate = report.bytes / 1e9 / max(report.seconds, 1e-9)
    print(f"{title}  {report.path}")
    print(f"  {report.tensors} tensors  {report.bytes / 1e9:.3f} GB  {report.seconds:.1f} s  {rate:.2f} GB/s")
    for notice in report.notices:
        print(f"  notice: {notice}")
