"""Formulas as MathML, which browsers draw themselves: no script, no network."""

from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml


def inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(str(latex2mathml.tex2mathml(node.astext())))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append('<div class="math">')
    writer.body.append(str(latex2mathml.tex2mathml(node.astext(), as_block=True)))
    writer.body.append('</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    app.add_html_math_renderer('mathml', (inline, None), (block, None))
    return {'parallel_read_safe': True}
