"""How sure the candidates are: calibration, ROC and precision-recall curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from asynckfold.results.report import sentences
from asynckfold.results.report.inline import lines, svg
from asynckfold.results.report.summary import Summary

HEIGHT = 240
EDGE = ((0.0, 0.0), (1.0, 1.0))
UNIT = svg.Scale(0.0, 1.0)


@dataclass(frozen=True)
class ProbabilityPanel:
    """A panel, its lines by candidate, and the line of no skill or of perfect calibration."""

    title: str
    under: str
    edge: Sequence[tuple[float, float]]
    curves: Sequence[tuple[str, Sequence[tuple[float, float]], Sequence[str]]]


def probabilities_svg(summary: Summary) -> Markup | None:
    """Draw the curves of two classes, and the calibration of the first candidate."""
    panels = list(panels_of(summary))
    if not panels:
        return None
    places = {row.name: place for place, row in enumerate(summary.candidates)}
    edge = len(svg.COLOURS)
    drawn = [
        lines.panel(
            panel.title,
            [
                *(
                    lines.PanelLine(places[name], points, said)
                    for name, points, said in panel.curves
                ),
                lines.PanelLine(edge, panel.edge, dashed=True),
            ],
            UNIT,
            UNIT,
            panel.under,
            HEIGHT,
        )
        for panel in panels
    ]
    named = {name: places[name] for panel in panels for name, _, _ in panel.curves}
    return Markup().join([lines.panels(*drawn), svg.legend(named)])


def panels_of(summary: Summary) -> Iterator[ProbabilityPanel]:
    """Yield the panels that the run has numbers for."""
    two = summary.two_classes
    if two is not None:
        roc = [
            (
                found.candidate,
                found.roc,
                [
                    f"{found.candidate}: finds {sentences.percent(up)} of {two.positive}, with "
                    f"{sentences.percent(across)} of the others; area {found.roc_area:.4f}"
                    for across, up in found.roc
                ],
            )
            for found in two.curves
        ]
        yield ProbabilityPanel("ROC: true positive rate", "false positive rate", EDGE, roc)
        precision = [
            (
                found.candidate,
                found.precision_recall,
                [
                    f"{found.candidate}: precision {sentences.percent(up)} at recall "
                    f"{sentences.percent(across)}; average {found.average_precision:.4f}"
                    for across, up in found.precision_recall
                ],
            )
            for found in two.curves
        ]
        share = ((0.0, two.share), (1.0, two.share))
        yield ProbabilityPanel("Precision", "recall", share, precision)
    sure = summary.calibration
    if sure is not None:
        points = list(zip(sure.confidence, sure.accuracy, strict=True))
        said = [
            f"{sure.candidate}: {sentences.percent(up)} of {sentences.plural(count, 'prediction')} "
            f"right, made with a mean probability of {sentences.percent(across)}"
            for (across, up), count in zip(points, sure.counts, strict=True)
        ]
        under = "probability of the predicted class"
        curve = (sure.candidate, points, said)
        yield ProbabilityPanel("Reliability: share that is right", under, EDGE, [curve])
