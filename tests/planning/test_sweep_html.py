"""The report as a browser gets it: self-contained, well-formed, and true to the rows."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from sweeps import GIB, a_sweep

from river_offload.planning.sweep_groups import GROUPS, grouped, number, spread, ticks, tokens, unit_for
from river_offload.planning.sweep_html import page, write_page
from river_offload.planning.sweep_svg import NARROW, WIDE, line_chart

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """What a page holds: its tags with their attributes, its text, and whether every tag is closed in turn."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


@pytest.fixture(scope="module")
def source() -> str:
    return page(a_sweep())


def test_every_tag_is_closed_in_turn(source):
    assert Page(source).open == []


def test_nothing_comes_from_elsewhere(source):
    for tag, attributes in Page(source).tags:
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert not attributes.keys() & {"src", "href", "srcset", "xlink:href", "onload", "onclick"}, (tag, attributes)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", source)


def test_pictures_are_well_formed(source):
    pictures = re.findall(r"<svg.*?</svg>", source, re.DOTALL)
    assert len(pictures) > 10
    for picture in pictures:
        assert ElementTree.fromstring(picture).tag == "svg"


def test_every_figure_of_the_rows_is_there(source):
    swept = a_sweep()
    text = " ".join(Page(source).text)
    for row in swept.rows:
        figures = [row.peak_device_bytes, row.paper_accounting_bytes]
        figures += [] if row.published_bytes is None else [row.published_bytes]
        for figure in figures:
            assert number(figure, GIB) in text, (row.method, row.context)
        assert row.note in text
        for key, name, _ in GROUPS:
            if size := grouped(row.categories)[key]:
                assert f"{row.method}, {tokens(row.context)}: {name} {number(size, GIB)} GiB" in text
    assert "budget 6.00 GiB" in text and "chunks of 512" in text


def test_names_are_escaped(source):
    assert "<model>" not in source
    assert "a <model> & more" in " ".join(Page(source).text)


def test_each_picture_is_there_for_wide_and_for_narrow_windows(source):
    places = [attributes.get("class") for tag, attributes in Page(source).tags if tag == "div"]
    assert places.count("wide") == places.count("narrow") > 0
    widths = {attributes["width"] for tag, attributes in Page(source).tags if tag == "svg" and "viewbox" in attributes}
    assert widths == {"1040", "358"}


def test_placement_is_drawn_layer_by_layer(source):
    maps = re.findall(r'<svg[^>]*aria-label="Where each layer rests".*?</svg>', source, re.DOTALL)
    drawn = [
        [cell.get("class").removeprefix("cell ") for cell in ElementTree.fromstring(one).iter("rect")] for one in maps
    ]
    expected = ["streamed", "absent", "streamed", "exit", "streamed", "exit", "streamed", "exit"]
    assert expected in drawn  # of `river`
    assert ["resident", "absent", *["resident", "exit"] * 2, "streamed", "exit"] in drawn  # of `river@3`


def test_points_stand_where_their_sizes_are():
    svg = ElementTree.fromstring(line_chart(a_sweep(budget_bytes=None), WIDE))
    heights = {}
    for group in svg.iter("g"):
        for dot in group.iter("circle"):
            said = dot.find("title").text
            heights[said] = float(dot.get("cy"))
    ordered = sorted(heights, key=heights.__getitem__)  # the top of the picture first
    sizes = [float(said.rpartition(": ")[2].removesuffix(" GiB")) for said in ordered]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 8


@pytest.mark.parametrize("frame", [WIDE, NARROW])
def test_labels_of_the_lines_do_not_overlap(frame):
    """River and river@3 end two per cent apart."""
    svg = ElementTree.fromstring(line_chart(a_sweep(), frame))
    heights = sorted(float(label.get("y")) for label in svg.iter("text") if label.get("class") == "label")
    assert len(heights) == 5
    assert all(low - high >= 16.9 for high, low in itertools.pairwise(heights))


@pytest.mark.parametrize("contexts", [(64,), (5, 16384)])
def test_a_single_context_and_no_budget_are_drawn(contexts, tmp_path):
    file = tmp_path / "a.html"
    write_page(a_sweep(budget_bytes=None, contexts=contexts), file)
    assert "budget" not in " ".join(Page(file.read_text(encoding="utf-8")).text)


def test_groups_lose_no_byte():
    for row in a_sweep().rows:
        assert sum(grouped(row.categories).values()) == row.peak_device_bytes
    assert grouped({"never heard of": 3})["working"] == 3


def test_scales_are_round():
    assert ticks(27.5, 6) == [0, 5, 10, 15, 20, 25, 30]
    assert ticks(0.9, 6) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(30, 6)[-1] == 30
    assert (tokens(16384), tokens(1000), tokens(1025)) == ("16K", "1000", "1025")
    assert (unit_for(2**30), unit_for(2**30 - 1)) == ((2**30, "GiB"), (2**20, "MiB"))


def test_labels_are_spread_and_stay_inside():
    assert spread([10, 50], 5, 0, 100) == [10, 50]
    assert spread([10, 10, 10], 5, 0, 100) == pytest.approx([5, 10, 15])
    assert spread([99, 98], 10, 0, 100) == pytest.approx([100, 90])
    found = spread([0, 1, 2, 60], 10, 0, 100)
    assert found == pytest.approx([0, 10, 20, 60])
