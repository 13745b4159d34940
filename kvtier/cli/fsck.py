"""`kvtier fsck DIR`: the offline check of an SSD tier's directory, and its repair."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from kvtier.cli import output
from kvtier.cli.app import Common, command
from kvtier.cli.output import Exit, size
from kvtier.errors import Unavailable
from kvtier.tiers.ssd.inspection import DirectoryReport, check


@command()
def fsck(
    common: Common,
    directory: Annotated[Path, Argument(help="The directory of an SSD tier, the setting ssd.path.")],
    repair: Annotated[
        bool, Option("--repair", help="Forget blocks that fail, move aside what does not belong.")
    ] = False,
) -> Exit:
    """Check an SSD tier's directory while no daemon has it: index, records, every block's header and bytes, stray
    files.

    Exit code 1 if something is left to repair, 4 if a daemon has the directory.
    """
    with ExitStack() as stack:
        bars: list[Callable[[int], None]] = []
        seen = 0

        def advance(done: int, total: int) -> None:
            nonlocal seen
            if not bars:
                bars.append(stack.enter_context(output.progress("checking", total)))
            bars[0](done - seen)
            seen = done

        try:
            report = check(directory, repair, advance)
        except Unavailable as error:
            output.failure(error, common.json)
            return Exit.REFUSED
    data: dict[str, Any] = {**asdict(report), "clean": report.clean}
    output.result(data, common.json, lambda: _print(report))
    return Exit.OK if report.clean else Exit.NEGATIVE


def _print(report: DirectoryReport) -> None:
    rows = [(finding.where, finding.what) for finding in report.findings]
    if report.found > len(rows):
        rows.append(("...", f"and {report.found - len(rows)} more"))
    if rows:
        output.table(("where", "found"), rows)
    repaired = f", {report.repaired} repaired" if report.repaired else ""
    print(
        f"{report.whole} of {report.blocks} blocks whole ({size(report.nbytes)}) in {report.namespaces} namespaces; "
        f"index {size(report.index_bytes)}, data file {size(report.data_bytes)}; {report.found} findings{repaired}"
    )
