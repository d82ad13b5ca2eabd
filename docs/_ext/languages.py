"""Chinese pages: their language, and links from a page to its translation."""

from __future__ import annotations

from typing import Any

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


def translate(text: str, page: str) -> str:
    """A word in the language of a page; itself where there is no translation."""
    return CHINESE.get(text, text) if page.startswith(FOLDER) else text


def name_language(
    app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object
) -> None:
    """Give the template the page's language, and its translation if there is one."""
    chinese = page.startswith(FOLDER)
    if chinese:
        context["language"] = "zh-Hans"
    other = page.removeprefix(FOLDER) if chinese else FOLDER + page
    if other in app.env.found_docs:
        context["translation"] = other


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", name_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
