"""What the shipped word filter stops wrongly, and which disguises of its words it finds."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

from benchmarks.engines.tables import Table
from benchmarks.instructions.disguise import BEYOND, disguised, in_a_sentence
from qwen_edit_zero.assets import demo_manifest
from qwen_edit_zero.edit_data.instructions.rule_files import read_rules
from qwen_edit_zero.edit_data.instructions.safety import SafetyFilter
from tests.edit_data.instructions.harmless import HARMLESS

_VERBS = (
    "把{}换成{}", "给{}加上{}", "将{}改为{}", "把{}和{}拼接", "去掉{}，保留{}", "{}变成{}", "{}，{}风格",
    "去除{}上的{}", "移除{} {}", "change {} to {}", "remove {} and add {}", "put {} on {}",
    "replace {} with {}", "turn {} into {}", "shoot {} with {}",
)  # fmt: skip
_THINGS_ZH = """
    红色 情侣装 背景 天空 夜晚 裸色 口红 外套 内衣 泳衣 儿童 小女孩 婴儿 老人 模特 男人 身份证 证件照 发票
    合同 印章 水印纸 文字 标题 血管 骨骼 心脏 牛排 鸡胸肉 血橙 刀具 枪战游戏 篮球 吊灯 上衣 跳楼价 体育 假发
    假花 银行 色调 情绪 脱脂牛奶 光泽 爱心 交通灯 表情 友情 头像 人脸 金额 日期 老师 校服 帽子 鞋子 皱纹
    肤色 头发 断桥 首饰 碎花 肢体动作 割草机 喉糖
"""
_THINGS_EN = (
    "the sky", "the red dress", "the woman", "the man's hat", "her hair", "her jacket", "a child",
    "the kids", "the baby", "a nude lipstick", "the white background", "the ID photo", "the passport photo",
    "the invoice template", "a blood orange", "the steak", "the chicken breast", "a knife",
    "the basketball player", "the suit", "the logo", "the mannequin", "a swimsuit", "the bikini",
    "a glass of wine", "the cocktail", "the strip of lights", "the name", "the face of the clock",
    "a dead tree", "the skeleton model", "a class photo", "grass", "the peacock", "the analysis chart",
    "the girl", "the boy in the water", "a stripe", "the clothes rack", "white power cord",
)  # fmt: skip


def measure() -> list[Table]:
    """Tables: wrongly stopped, by list; found, by disguise."""
    rules = SafetyFilter()
    demo = {
        json.loads(line)["instruction"]
        for split in ("train", "validation")
        for line in demo_manifest(split).read_text(encoding="utf-8").splitlines()
    }
    held_out = (Path(__file__).parent / "held_out.txt").read_text(encoding="utf-8").splitlines()
    rows = []
    lists = {
        "instructions of the demo": sorted(demo),
        "harmless ones the rules were tuned on": HARMLESS,
        "harmless ones written afterwards": held_out,
        "pairs of harmless things in templates": _pairs(),
    }
    for name, texts in lists.items():
        found = [(text, finding) for text in texts for finding in rules.find(text)]
        stopped = {text for text, finding in found if finding.level == "block"}
        flagged = {text for text, _ in found} - stopped
        rows.append((name, len(texts), len(stopped), len(flagged), "; ".join(sorted(stopped)[:3])))
    wrong = Table("Harmless instructions", ("list", "instructions", "stopped", "only flagged", "such as"), rows)
    return [wrong, _disguises(rules), _beyond(rules)]


def _pairs() -> list[str]:
    texts = []
    for verb in _VERBS:
        things = _THINGS_EN if verb.isascii() else _THINGS_ZH.split()
        texts += [verb.format(a, b) for a, b in product(things, things) if a != b]
    return texts


def _disguises(rules: SafetyFilter) -> Table:
    tried, found = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for entry in read_rules(None, default="safety.yaml"):
        spelled = entry.values.get("pinyin", {})
        for word in entry.texts("words"):
            script = "Latin" if word.isascii() else "Chinese"
            for way, text in disguised(word, pinyin=word in spelled).items():
                tried[script, way] += 1
                found[script, way] += any(f.rule == entry.name for f in rules.find(in_a_sentence(text)))
    rows = [(script, way, number, found[script, way]) for (script, way), number in tried.items()]
    rows.append(("all", "", sum(tried.values()), sum(found.values())))
    return Table("Words of the rules in disguise", ("script", "disguise", "words", "found"), rows)


def _beyond(rules: SafetyFilter) -> Table:
    words = [
        word for entry in read_rules(None, default="safety.yaml") for word in entry.texts("words") if word.isascii()
    ]
    rows = []
    for way, change in BEYOND.items():
        texts = [in_a_sentence(change(word)) for word in words]
        rows.append((way, len(texts), sum(bool(rules.find(text)) for text in texts)))
    return Table("What the rules were not made for (Latin words)", ("change", "words", "found"), rows)
