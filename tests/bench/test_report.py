"""The benchmark's files: what the design prescribes, and a plot that is well-formed and has every line."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench.report import Record, Report, line, plot

RESULTS = Path(__file__).parent / "results"
SVG = "{http://www.w3.org/2000/svg}"
REPORT_KEYS = ["card", "driver", "commit", "floor_tb_s", "barrier_us", "records"]
RECORD_KEYS = [
    "bench", "weights", "batch", "context", "tokens", "median_ms", "p95_ms", "bytes", "floor_ms", "kernels", "note",
]  # fmt: skip


def decode(weights: str, batch: int, context: int, ms: float) -> Record:
    return Record("decode", weights, batch, context, batch, ms, ms * 1.1, 10**9, ms / 4, 343, "a note")


@pytest.fixture
def report() -> Report:
    records = [
        decode(weights, batch, context, 0.7 + batch * context / 1e5)
        for weights in ("nvfp4", "bf16")
        for batch in (1, 8)
        for context in (1024, 100_000, 262_144)
    ]
    records.append(Record("prefill", "nvfp4", 1, 8192, 8192, 131.0, 140.0, None, None, None))
    return Report("NVIDIA H200 <&>", "580.1", "abc1234", "20261129", 4.2, None, tuple(records))


def test_json(report: Report, tmp_path: Path) -> None:
    paths = report.write(tmp_path / "results")
    assert [path.suffix for path in paths] == [".json", ".svg"]
    assert len({path.stem for path in paths}) == 1 and paths[0].stem.endswith("-20261129-abc1234")
    written = json.loads(paths[0].read_text())
    assert list(written) == REPORT_KEYS
    assert all(list(record) == RECORD_KEYS for record in written["records"])
    assert written["records"][-1]["bytes"] is None and written["barrier_us"] is None
    assert tuple(Record(**record) for record in written["records"]) == report.records


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_have_the_schema(path: Path) -> None:
    written = json.loads(path.read_text())
    assert list(written) == REPORT_KEYS
    for values in written["records"]:
        record = Record(**values)
        assert 0 < record.median_ms <= record.p95_ms, record
        # A floor's bandwidth is what torch's sum read in the same run; our LM head has read 5.4 % faster.
        assert record.fraction is None or 0 < record.fraction < 1.1, "faster than its floor: the floor is wrong"


def test_plot(report: Report) -> None:
    """A measured line and a floor per batch and format, inside the picture."""
    root = ElementTree.fromstring(plot(report))
    assert root.tag == f"{SVG}svg"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    lines = [item for item in root.iter(f"{SVG}polyline") if item.attrib["stroke"] != "#ddd"]
    assert len(lines) == 2 * 2 * 2 and sum("stroke-dasharray" in item.attrib for item in lines) == 4
    points = [tuple(map(float, p.split(","))) for item in lines for p in item.attrib["points"].split()]
    assert len(points) == 3 * len(lines)
    assert all(0 < x < width and 0 < y < height for x, y in points)
    measured, floor = ([float(p.split(",")[1]) for p in item.attrib["points"].split()] for item in lines[:2])
    assert all(m < f for m, f in zip(measured, floor, strict=True)), "the floor lies below, where y is larger"
    assert measured == sorted(measured, reverse=True)
    text = "".join(root.itertext())
    assert "NVIDIA H200 <&>" in text and "batch 8" in text and "100K" in text and "1K" in text


@pytest.mark.parametrize("records", [(), (decode("nvfp4", 1, 1024, 1.0),)])
def test_plot_of_little(records: tuple[Record, ...]) -> None:
    ElementTree.fromstring(plot(Report("card", "", "", "20261129", 4.2, None, records)))


def test_line(report: Report) -> None:
    text = line(report.records[0])
    assert "25% of" in text and "343 kernels" in text and "a note" in text and "p95" in text
    assert "None" not in line(report.records[-1])
