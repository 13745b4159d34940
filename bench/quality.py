"""What quantized KV costs on SmolLM2-135M (the dequantized Q4_1 build): two texts, three lengths, all schemes, natural
and as its outlier twin.

`python -m bench.quality [--novels Rdata.rdb] [--out bench/results]`. Takes about an hour of two cores; a cell that
stands in the CSV already is not run again, so it may be stopped. The second text is in Debian's package
r-cran-janeaustenr (`apt-get download`, `dpkg -x`); without it there is one."""

from __future__ import annotations

import csv
import re
import shlex
import struct
import sys
import zlib
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.harness import ROOT, progress
from kvtier.errors import Invalid
from kvtier.quality import calibrate, compare, loaded_model, outlier_twin, retrieval, standard_schemes, texts
from kvtier.quality.observe import Observer
from kvtier.quality.schemes import Scheme
from kvtier.quality.texts import Sample, digest

CALIBRATION = (8, 512)  # pieces, and tokens of each: half of them from each text
FACTOR = 512  # of the twin
# (twin?, length, sequences): the most telling cells first, as somebody may stop it.
CELLS = ((True, 512, 3), (False, 4096, 1), (False, 2048, 1), (False, 512, 2), (True, 2048, 1), (True, 4096, 1))
COSTLY = (
    2048  # from this length on, what was seen to differ from others by less than the interval at 512 tokens is left out
)
COLUMNS = (
    "model",
    "text",
    "length",
    "sequences",
    "scheme",
    "native_ppl",
    "ppl",
    "kl",
    "kl_half",
    "kl_0_512",
    "kl_512_2048",
    "kl_2048_4096",
    "top1",
)
COLUMNS = (*COLUMNS, "top1_half", "clipped_share")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def novels(path: Path) -> str:
    """The text of the novels in an R lazy-load database, without R: compressed records, in them strings with a header
    each."""
    raw, at, lines = path.read_bytes(), 0, []
    while at + 4 < len(raw):
        inflate = zlib.decompressobj()
        record = inflate.decompress(raw[at + 4 :])
        at = len(raw) - len(inflate.unused_data)
        place = 0
        while found := re.compile(rb"\x00[\x00\x04][\x00\x80]\x09").search(record, place):  # a CHARSXP, ASCII or UTF-8
            (length,) = struct.unpack(">i", record[found.end() : found.end() + 4])
            if not 0 <= length <= 4000:
                place = found.end()
                continue
            place = found.end() + 4 + length
            lines.append(record[found.end() + 4 : place].decode("utf-8", "replace"))
    if len(lines) < 1000:
        raise Invalid(f"{path} holds no novels")
    return "\n".join(lines)


def pieces(tokens: list[int], first: int, length: int, number: int) -> list[list[int]]:
    """Pieces apart from each other by a little more than their length."""
    return [tokens[first + i * (length + 64) : first + i * (length + 64) + length] for i in range(number)]


def row(model: str, text: str, length: int, result: compare.Result) -> dict[str, Any]:
    """One line of the CSV."""
    kl, top1 = result.over(result.kl), result.over(result.top1)
    assert kl is not None and top1 is not None
    found: dict[str, Any] = {
        "model": model,
        "text": text,
        "length": length,
        "sequences": kl.sequences,
        "scheme": result.scheme.name,
    }
    found |= {
        "native_ppl": f"{result.native_perplexity:.4f}",
        "ppl": f"{result.perplexity:.4f}",
        "clipped_share": f"{result.clipped:.3g}",
    }
    for name, interval in (("kl", kl), ("top1", top1)):
        found |= {name: f"{interval.mean:.5f}", f"{name}_half": "" if interval.half is None else f"{interval.half:.5f}"}
    for low, high in ((0, 512), (512, 2048), (2048, 4096)):
        bucket = result.over(result.kl, low, high)
        found[f"kl_{low}_{high}"] = "" if bucket is None else f"{bucket.mean:.5f}"
    return found


def copy_back(
    model: loaded_model.LoadedModel, evaluation: dict[str, list[int]], schemes: list[Scheme], path: Path, command: str
) -> None:
    """12 passages of shuffled words hidden in 2,048 tokens of each text: how likely is each passage's end, given its
    beginning."""
    listed = sorted(
        {
            word
            for word in texts.evaluation_text().split()
            if word.isascii() and word.isalpha() and word.islower() and 3 < len(word) < 10
        }
    )
    words, newline = [model.encode(f" {word}") for word in listed], model.encode("\n\n")
    with path.open("w", newline="") as file:
        file.write(f"# {command}\n# {model.note}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("text", "scheme", "answer_nll", "right_tokens"))
        for text, ids in evaluation.items():
            context = retrieval.copies(newline, ids[20_000:23_000], words, 2048, 12, 0)
            for found in retrieval.measure(model, "copy", [context], [None, *schemes]):
                writer.writerow((text, found.scheme, f"{found.nll.mean:.4f}", f"{found.correct.mean:.4f}"))
                file.flush()


@app.command()
def main(
    novels_file: Annotated[Path | None, typer.Option("--novels", help="Rdata.rdb of r-cran-janeaustenr.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Directory of the CSV.")] = ROOT / "bench" / "results",
    only: Annotated[str, typer.Option("--only", help="One of the texts.")] = "",
    retrieval: Annotated[
        bool, typer.Option("--retrieval", help="Only copying from far back, at 2,048 tokens.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="cpu, or another device of torch.")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads that torch may use.")] = 2,
) -> None:
    """Run what is missing in the CSV."""
    torch.set_num_threads(threads)
    path = out / "quality.csv"
    done = (
        list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))
        if path.exists()
        else []
    )
    model = loaded_model.load(loaded_model.SMOLLM, device=device)
    evaluation = {"manual": model.encode(texts.evaluation_text())}
    halves = [model.encode(texts.calibration_text())]
    if novels_file is not None:
        text = novels(novels_file)
        evaluation["novels"] = model.encode(text[1_200_000:1_500_000])
        halves.append(model.encode(text[200_000:300_000]))
    number, length = CALIBRATION
    samples = [Sample("mix", tuple(piece)) for ids in halves for piece in pieces(ids, 0, length, number // len(halves))]
    command = shlex.join(["python", "-m", "bench.quality", *sys.argv[1:]])
    if retrieval:
        schemes = standard_schemes.from_observer(
            ("one", "head", "token-head", "channel-static"), calibrate.observe(model, samples)
        )
        copy_back(model, evaluation, schemes, out / "quality_retrieval.csv", command)
        return
    observers: dict[bool, Observer] = {}
    for twin_, size, sequences in CELLS:
        name = f"twin {FACTOR}" if twin_ else "natural"
        for text, ids in evaluation.items():
            if (only and text != only) or any(
                (r["model"], r["text"], r["length"]) == (name, text, str(size)) for r in done
            ):
                continue
            steps = sequences * -(-size // calibrate.CHUNK)
            with (
                outlier_twin.outliers(model, FACTOR if twin_ else 1),
                progress(f"{name}, {text}, {size}", steps) as tick,
            ):
                if twin_ not in observers:
                    observers[twin_] = calibrate.observe(model, samples)
                names = tuple(
                    name for name in standard_schemes.NAMES if size < COSTLY or name not in ("bf16", "block-head")
                )
                schemes = standard_schemes.from_observer(names, observers[twin_])
                results = compare.compare(model, pieces(ids, 20_000, size + 1, sequences), schemes, lambda *_: tick())
            done += [{key: str(value) for key, value in row(name, text, size, result).items()} for result in results]
            with path.open("w", newline="") as file:
                file.write(
                    f"# {command}\n# {model.note}; calibrated on {number} x {length} tokens, texts:{digest(samples)}\n"
                )
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(done)


if __name__ == "__main__":
    app()
