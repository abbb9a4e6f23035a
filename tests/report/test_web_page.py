"""The web page of a report: what it shows, that values stay text, and that it needs no network."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_quantization import BARE, FULL

from quantkit.evaluation.measurements import CategoryAccuracy
from quantkit.evaluation.samples import Sample, Samples
from quantkit.plan.cost.phases import GroupCost, MachineRoofline, PhaseCost
from quantkit.quantization.rounding.errors import LayerLoss
from quantkit.quantization.rounding.pack_histograms import Clipping, Histogram, PackHistograms
from quantkit.quantization.search import Candidate, Loss, SearchResult
from quantkit.report.comparison import compare_reports
from quantkit.report.document import Part, PlannedLayer, report_json
from quantkit.report.histograms import pack_pictures
from quantkit.report.known_points import ASSET, known_points_picture
from quantkit.report.layer_map import layer_map
from quantkit.report.pictures import Point, scatter
from quantkit.report.roofline import roofline_picture, roofline_table
from quantkit.report.stored import read_report
from quantkit.report.web_page import comparison_html, report_html

pytestmark = pytest.mark.once
replace = dataclasses.replace
ROLES = ("attention_query", "attention_key", "attention_value", "attention_out", "ffn_up", "ffn_down")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\" onfocus='alert(1)' {{ 7 * 7 }}"
MAX_BYTES = 3_000_000


def deep_report(num_blocks: int, *, name: str = "gpt2"):
    """A report with a map: the down projections stay float, and errors grow with the depth."""
    layers = [
        PlannedLayer(
            name=f"{name}.h.{block}.{role}",
            block=f"{name}.h.{block}",
            role=role,
            in_features=768,
            out_features=768,
            format=None if role == "ffn_down" else "int8 block 64, inputs by block",
            reason="max(768, 768) = 768 >= 256",
        )
        for block in range(num_blocks)
        for role in ROLES
    ]
    head = replace(
        layers[0], name="lm_head", block=None, role="lm_head", format="int4 channel, inputs by token"
    )
    losses = [
        LayerLoss(
            name=layer.name,
            layers=(layer.name,),
            format=layer.format or "",
            weight_error=0.005 * (1 + index / len(layers)),
            plain_weight_error=0.01,
        )
        for index, layer in enumerate(layers)
        if layer.format
    ]
    loss = Loss(ppl_increase=0.01, kl_divergence=0.004, top1_agreement=0.97)
    candidates = tuple(
        Candidate(
            label=f"step {number}",
            choices=(("lm_head", f"int{number}"),),
            cost=1e6 * number,
            num_bytes=1e6 * number,
            microseconds=None,
            predicted_kl=0.01,
            loss=replace(loss, kl_divergence=0.04 / number**2),
        )
        for number in (2, 4, 8)
    )
    search = SearchResult(
        max_ppl_increase=None,
        max_kl=0.01,
        prefer="size",
        units=(),
        candidates=candidates,
        chosen=candidates[1],
        verdicts=(loss,),
        holds=True,
    )
    counts = tuple(range(40)) + tuple(range(40, 0, -1))
    weights = Histogram(low=-1.0, high=1.0, counts=counts)
    clipping = Clipping(lowest=0.1, median=0.5, highest=0.9)
    histograms = tuple(
        PackHistograms(
            name=loss.name,
            format=loss.format,
            weights=weights,
            rounded=weights,
            weight_clipping=clipping,
            inputs=weights,
            **inputs,
        )
        for loss, inputs in zip(
            losses, ({"input_clipping": clipping}, {"input_range": (-0.5, 0.75)}, {}), strict=False
        )
    )
    ffn = GroupCost(group="FFN", moved_bytes=4_000_000, macs=4_000_000, flops=8_000_000, floor_ms=1.0)
    roofline = MachineRoofline(
        machine="a processor",
        bandwidth_gb_per_s=4.0,
        peak_tera_ops={"fp32": 0.1, "int8": 0.4},
        phases=(
            PhaseCost(phase="prompt", num_tokens=128, past=0, measured_ms=20.0, groups=(ffn,)),
            PhaseCost(
                phase="token",
                num_tokens=1,
                past=144,
                measured_ms=2.5,
                groups=(ffn, replace(ffn, group="lm_head", floor_ms=0.5)),
            ),
        ),
    )
    samples = Samples(
        kind="continuation",
        samples=(
            Sample(text="The king", reference=(" of", " men"), quantized=(" of", " war"), first_difference=1),
            Sample(text="A day", reference=(" in", " May"), quantized=(" in", " May"), first_difference=None),
        ),
    )
    return replace(
        FULL,
        model=name,
        layers=(*layers, head),
        layer_losses=tuple(losses),
        histograms=histograms,
        roofline=roofline,
        accuracy=replace(
            FULL.accuracy,
            categories=tuple(
                CategoryAccuracy(
                    name=category,
                    kl_divergence=0.01,
                    kl_standard_error=0.001,
                    flip_rate=0.0312,
                    num_tokens=765,
                    window=256,
                )
                for category in ("prose", "code")
            ),
        ),
        search=search,
        samples=samples,
        size=replace(FULL.size, parts=(Part(name="ffn, INT8", num_bytes=1000),)),
        kind="decoder",
        recipe="model: gpt2\n",
        files={"model.onnx": "0" * 64},
        seconds={"accuracy": 2.5},
        notes=("a note",),
    )


class Elements(HTMLParser):
    """Every element with its attributes, and the text of each kind of element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.open = ["document"]
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_data(self, data):
        self.text.setdefault(self.open[-1], []).append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(report):
    return report_html(report_json(report))


def test_the_page_answers_in_the_order_of_the_questions():
    page = page_of(deep_report(3))
    words = [
        "Faithful to the original" if FULL.judgement else "Not judged",
        "KL divergence 0.0083",
        "By category of text",
        "3.12%",
        "The same prompts, continued",
        "The model, projection by projection",
        "Size and KL divergence of the search",
        "Latency of decode",
        "Where the bytes go",
        "Roofline of the layers on this machine",
        "token, measured",
        "Largest relative errors",
        "the largest code is worth 0.1 to 0.9, median 0.5",
        "clipped to -0.5 to 0.75",
        "Load it",
        "quantkit quantize --recipe recipe.yaml",
    ]
    places = [page.find(word) for word in words]
    assert -1 not in places, dict(zip(words, places, strict=True))
    assert places == sorted(places)


def test_an_artifact_stands_beside_schemes_as_measured_on_a_released_model():
    measured = Path(__file__).parents[2] / "docs" / "benchmarks" / "real.json"
    rows = json.loads(measured.read_text(encoding="utf-8"))["models"]["smollm2-135m-instruct"]
    known = json.loads(ASSET.read_text(encoding="utf-8"))["schemes"]
    assert len(known) == 10
    for name, point in known.items():
        row = rows["default" if name == "int8_block32" else name]
        assert point == {"bytes": row["bytes"], "kl_divergence": row["accuracy"]["prose"]["kl_divergence"]}
    report = deep_report(3)
    report = replace(report, search=None, size=replace(report.size, reference_bytes=500_000_000))
    document = report_json(report)
    picture = known_points_picture(document)
    *_, own = picture.points
    size = document["size"]
    assert own.x == pytest.approx(size["artifact_bytes"] / size["reference_bytes"])
    assert own.y == document["accuracy"]["kl_divergence"]
    assert [point.is_chosen for point in picture.points] == [False] * 10 + [True]
    assert "Size and KL divergence beside the schemes" in page_of(report)
    assert known_points_picture({**document, "accuracy": {}}) is None


def test_a_search_names_its_formats_in_place_of_the_scheme():
    report = deep_report(3)
    choices = (("first", "int4_block128"), ("second", "int8_block32"), ("third", "int4_block128"))
    candidates = (replace(report.search.candidates[0], choices=choices), *report.search.candidates[1:])
    page = page_of(
        replace(report, search=replace(report.search, candidates=candidates, chosen=candidates[0]))
    )
    named = "2 x int4_block128, 1 x int8_block32"
    assert f"{named} (searched) for {report.target}" in page, "the headline"
    assert page.count(named) >= 3, "the headline, the budget's line and a point of the picture"


def test_what_was_not_measured_is_absent():
    page = page_of(BARE)
    for words in (
        "continued",
        "projection by projection",
        "Latency",
        "KL divergence",
        "Load it",
        "None",
        "nan",
    ):
        assert words not in page.partition("<body>")[2].partition("<script>")[0], words


def test_the_lines_of_a_histogram_stand_at_the_largest_code():
    weights, inputs = pack_pictures(report_json(deep_report(1))["histograms"])[0].pictures
    # 320 units from -1 to 1.
    assert (weights.solid, weights.dashed) == ((16.0, 304.0), (80.0, 240.0))
    heights = [float(point.split(",")[1]) for point in weights.line.split()]
    assert (min(heights), max(heights)) == (0.0, 110.0), "the most counts reach the top, no count the bottom"
    assert not inputs.line, "inputs have no second distribution"


@pytest.mark.parametrize(
    ("activations", "caption"), [("float", "not rounded"), ("graph8", "their range stands in the graph")]
)
def test_inputs_without_a_known_scale_say_why(activations, caption):
    entry = {
        **report_json(deep_report(1))["histograms"][2],
        "format": f"int8 channel, inputs by {activations}",
    }
    (pack,) = pack_pictures([entry])
    assert pack.pictures[1].caption == caption


def test_the_roofline_puts_the_measured_model_below_its_floor():
    document = report_json(deep_report(1))["roofline"]
    plot, table = roofline_picture(document), roofline_table(document)
    token = next(point for point in plot.points if point.label == "token, measured")
    assert (token.x, token.y) == (pytest.approx(2.0), pytest.approx(16e6 / 2.5e-3 / 1e9))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["all, at least"] == ("4.00", "4.00", "1.00", "8.00", "8.00", "1.50")
    assert rows["lm_head"][:3] == ("-", "-", "-")
    assert (rows["measured"][2], rows["measured"][5]) == ("20.0", "2.50")
    # The roof bends where 4 GB/s feed 400e9 operations a second.
    assert f"{plot.x.at(100)},{plot.y.at(400)}" in plot.frontier.split()


def test_names_and_tokens_are_text_and_never_code():
    report = deep_report(2, name=HOSTILE)
    samples = Samples(
        kind="continuation",
        samples=(Sample(text=HOSTILE, reference=(HOSTILE,), quantized=("x",), first_difference=0),),
    )
    page = page_of(
        replace(
            report, samples=samples, notes=(HOSTILE,), scheme=HOSTILE, recipe=HOSTILE, failures=(HOSTILE,)
        )
    )
    plain, hostile = Elements(page_of(deep_report(2))), Elements(page)
    for tag in ("script", "img", "style", "iframe"):
        assert len(hostile.named(tag)) == len(plain.named(tag))
    assert not [
        key
        for _, attributes in hostile.elements
        for key in attributes
        if key.startswith("on") or key == "src"
    ]
    assert "".join(hostile.text["h1"]).strip() == HOSTILE, "the template's own syntax included"
    assert HOSTILE in "".join(hostile.text["mark"])


def test_the_policy_allows_the_one_script_and_nothing_from_outside():
    page = page_of(deep_report(2))
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    elements = Elements(page)
    (policy,) = [entry["content"] for entry in elements.named("meta") if "http-equiv" in entry]
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert not elements.named("link") + elements.named("img")
    assert all(entry["href"].startswith("#") for entry in elements.named("a"))
    assert "http" not in page.replace("http-equiv", "")


def test_a_map_cell_tells_shape_format_error_and_reason():
    found = layer_map(report_json(deep_report(3)))
    assert found.columns == ("query", "key", "value", "out", "up", "down")
    assert [row.label for row in found.rows] == ["0", "1", "2"]
    query, down = found.rows[2].cells[0], found.rows[2].cells[5]
    for words in ("gpt2.h.2.attention_query", "768 in, 768 out", "INT8 block 64", "0.83%", ">= 256"):
        assert words in query.description, words
    assert (down.format, down.format_step, down.error_step) == ("float", None, None)
    assert found.errors == ("0.50%", "0.94%")
    steps = [row.cells[0].error_step for row in found.rows]
    assert steps == sorted(steps)
    assert steps[0] == 0, "the least error has the lightest shade"
    assert [row.label for row in found.outside] == ["lm_head"]
    names = [name for name, _ in found.formats]
    assert names == ["INT8 block 64, inputs by block", "INT4 channel, inputs by token", "float"]


def test_experts_of_one_role_share_a_cell_with_the_worst_error():
    report = deep_report(1)
    expert = replace(report.layers[0], name="gpt2.h.0.expert")
    losses = (*report.layer_losses, replace(report.layer_losses[0], layers=(expert.name,), weight_error=0.5))
    found = layer_map(report_json(replace(report, layers=(*report.layers, expert), layer_losses=losses)))
    cell = found.rows[0].cells[0]
    assert cell.error == "50.00%"
    assert cell.description.startswith("the worst of 2\ngpt2.h.0.expert")


def test_every_projection_stands_in_the_plain_table_too():
    page = Elements(page_of(deep_report(3)))
    heads = page.text["th"]
    assert all(heads.count(layer.name) >= 1 for layer in deep_report(3).layers)


def test_the_report_is_read_again_with_its_map_and_its_samples(tmp_path):
    report = deep_report(2)
    (tmp_path / "report.json").write_text(json.dumps(report_json(report)))
    again = read_report(tmp_path)
    assert (again.layers, again.samples, again.size) == (report.layers, report.samples, report.size)
    assert again == report


def test_a_model_of_300_layers_fits():
    assert len(page_of(deep_report(300)).encode()) < MAX_BYTES


def test_ticks_and_points_lie_inside_and_the_frontier_falls():
    points = [Point(x=x, y=y, label="", description="") for x, y in ((1, 9), (2, 0.5), (3, 0.7), (4, 0.01))]
    plot = scatter("", ("", ""), points)
    assert plot.y.is_logarithmic
    assert not plot.x.is_logarithmic
    for axis in (plot.x, plot.y):
        low, high = sorted((axis.start, axis.end))
        assert len(axis.ticks) >= 2
        assert all(low <= at <= high for at, _ in axis.ticks)
    # (3, 0.7) is larger and worse than (2, 0.5).
    wanted = [f"{plot.x.at(x)},{plot.y.at(y)}" for x, y in ((1, 9), (2, 0.5), (4, 0.01))]
    assert plot.frontier.split() == wanted
    for at, text in plot.y.ticks:
        assert plot.y.at(float(text)) == at


def test_equal_points_make_no_empty_axis():
    plot = scatter("", ("", ""), [Point(x=0, y=0, label="", description="")] * 2)
    assert plot.x.lowest < 0 < plot.x.highest


def test_the_page_of_a_comparison_shows_artifacts_with_comparable_figures():
    first = {**report_json(FULL), "folder": "a/one", "tokenizer": "t"}
    smaller = {**first, "folder": "a/two", "size": {**first["size"], "artifact_bytes": 9_000_000}}
    page = comparison_html(compare_reports([first, smaller]))
    for words in ("Comparison of artifacts", "one, two", "9.00", "Size and KL divergence", "Ratio to one"):
        assert words in page, words
    other = {**smaller, "model": "another"}
    assert "<svg" not in comparison_html(compare_reports([first, other])), "KL of another original"
    others = [{**report, "model": "another"} for report in (first, smaller)]
    page = comparison_html(compare_reports([first, smaller]), compare_reports(others))
    for words in (f"Size and KL divergence: {first['model']}", "Time of a token and KL divergence: another"):
        assert words in page, words
