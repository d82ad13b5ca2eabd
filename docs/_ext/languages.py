"""Chinese pages: their language, the words around the text, and links to translations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from gettext import NullTranslations
from pathlib import Path
from typing import Any

import pydata_sphinx_theme
import sphinx
from sphinx import locale
from sphinx.application import Sphinx

FOLDER = "zh/"
CHINESE = {
    "All methods": "全部方法",
    "method": "方法",
    "# of # methods": "# / # 种方法",
    "site": "注入点",
    "axes": "轴数",
    "mask": "掩码",
    "past the trained length": "超过训练长度",
    "measured on text": "文本实测",
    "time": "时间",
    "memory, MB": "内存，MB",
    "used by": "采用者",
    "words": "关键词",
    "a released model": "已发布的模型",
    "token vectors": "词元向量",
    "queries and keys": "查询和键",
    "scores": "分数",
    "values": "值",
    "none": "无",
    "any": "任意",
    "causal only": "仅因果",
    "either": "均可",
    "holds": "保持",
    "degrades": "退化",
    "breaks": "失效",
    "ends": "无位置",
    "limited": "有上限",
    "open": "未定",
    "unsure": "不确定",
    "untestable": "无法测试",
}
"""Words of generated tables."""

AROUND = {
    "Breadcrumb": "所在位置",
    "© Copyright %(copyright)s.": "© %(copyright)s",
    "Collapse Sidebar": "收起侧栏",
    "Color mode": "配色",
    "Expand Sidebar": "展开侧栏",
    "Home": "首页",
    "On this page": "本页目录",
    "Site navigation": "网站导航",
    "System Settings": "跟随系统",
}
"""Words around a page that neither Sphinx nor the theme translates, or not into what is usual."""

LINKS = re.compile(r'title="(Link to this [a-z]+)"')
"""Titles that Sphinx writes into every page in the language of the site."""

SECTIONS = {
    "start": "入门",
    "choose": "选型",
    "methods": "方法",
    "extensions": "扩展方法",
    "guides": "指南",
    "theory": "理论",
    "explorer": "交互图",
    "gallery": "图例",
    "reference": "参考",
    "results": "实验结果",
    "about": "关于",
}
"""Links in the header by folder."""


@cache
def catalogue() -> NullTranslations:
    """Sphinx's and the theme's translation."""
    homes = [Path(str(module.__file__)).parent for module in (sphinx, pydata_sphinx_theme)]
    folders = [home / "locale" for home in homes]
    return locale.init(folders, "zh_CN", namespace="posenc_chinese")[0]


def word_around(text: str) -> str:
    """A word of the theme in Chinese."""
    return AROUND.get(text) or catalogue().gettext(text)


def link_title(match: re.Match[str]) -> str:
    """The title of a link to a heading or term, in Chinese."""
    return f'title="{word_around(match[1]).rstrip("。")}"'


def translate(text: str, page: str) -> str:
    """A word in the language of a page; itself where there is no translation."""
    return CHINESE.get(text, text) if page.startswith(FOLDER) else text


def sections(page: str, pages: set[str]) -> Iterator[tuple[str, str, bool]]:
    """Page and title of each section, and whether it holds the page."""
    for folder, title in SECTIONS.items():
        chinese = f"{FOLDER}{folder}/"
        home = chinese if f"{chinese}index" in pages else f"{folder}/"
        yield f"{home}index", title, page.startswith(home)


def name_language(
    app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object
) -> None:
    """Give the template the page's language, and its translation if there is one."""
    chinese = page.startswith(FOLDER)
    if chinese:
        context |= {"language": "zh-Hans", "gettext": word_around}
        context["theme_search_bar_text"] = "搜索文档……"
        context["sections"] = list(sections(page, app.env.found_docs))
        context["body"] = LINKS.sub(link_title, context.get("body", ""))
    _, *neighbours = app.builder.relations.get(page, (None, None, None))  # type: ignore[attr-defined]
    for way, neighbour in zip(("prev", "next"), neighbours, strict=True):
        if neighbour and neighbour.startswith(FOLDER) is not chinese:
            context[way] = None
    other = page.removeprefix(FOLDER) if chinese else FOLDER + page
    if other in app.env.found_docs:
        context["translation"] = other


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", name_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
