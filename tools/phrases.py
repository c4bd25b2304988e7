"""Instructions of the demo data in Chinese, English and a mixture, several phrasings for each edit."""

from __future__ import annotations

from edits import COLOURS, Colour, Place, Shape, Style, Turn

ZH_COLOUR = {
    "red": "红", "green": "绿", "blue": "蓝", "yellow": "黄", "purple": "紫", "orange": "橙",
    "black": "黑", "white": "白",
}  # fmt: skip
ZH_SHAPE = {"disc": "圆形", "square": "方形", "diamond": "菱形"}
TEXTS = ("夏天", "SALE", "你好", "OPEN", "咖啡", "NEW", "晚安", "2026", "春风", "HELLO", "大吉", "GO")
BANNERS: dict[str, Colour] = {
    "red": COLOURS["red"], "white": (250, 250, 250), "black": (15, 15, 15), "blue": COLOURS["blue"],
}  # fmt: skip


def _nth(i: int, *choices: str) -> str:
    return choices[i % len(choices)]


def recolour(i: int, colour: str) -> str:
    zh = ZH_COLOUR[colour]
    return _nth(
        i // len(COLOURS) + i,
        f"把整张图片变成{zh}色调",
        f"Recolour the whole picture in {colour}",
        f"将画面染成{zh}色",
        f"Tint the image {colour}",
        f"给图片加上 {colour} 色调",
    )


def style(i: int, kind: Style) -> str:
    return _nth(
        i,
        *{
            "greyscale": ("转换为黑白照片", "Convert the picture to greyscale", "把图片变成 black and white"),
            "night": ("把场景变成夜晚", "Turn the scene into night", "改成 night 夜景"),
            "sepia": ("做成怀旧的棕褐色老照片", "Give it a sepia tone like an old photo", "加上 sepia 复古色调"),
            "negative": ("反相，做成底片效果", "Invert the colours like a negative", "把颜色 invert 成底片"),
        }[kind],
    )


def geometry(i: int, kind: Turn) -> str:
    return _nth(
        i,
        *{
            "mirror": ("左右镜像翻转图片", "Mirror the picture left to right", "把图片 mirror 左右翻转"),
            "flip": ("上下颠倒翻转图片", "Flip the picture upside down", "把图片 flip 上下翻转"),
            "half_turn": ("将图片旋转180度", "Rotate the picture by 180 degrees", "把图片 rotate 180 度"),
        }[kind],
    )


def add_text(i: int, text: str, place: Place, colour: str) -> str:
    zh_place, zh = {"top": "顶部", "bottom": "底部"}[place], ZH_COLOUR[colour]
    return _nth(
        i // len(TEXTS) + i,
        f"在图片{zh_place}加一条{zh}色横幅，写上“{text}”",
        f'Add a {colour} banner at the {place} with the text "{text}"',
        f"{zh_place}添加{zh}色横幅，文字是“{text}”",
        f'Put a {colour} banner saying "{text}" at the {place}',
        f"在{zh_place}加一个 {colour} banner，写“{text}”",
    )


def remove(i: int, shape: Shape, colour: str) -> str:
    zh_shape, zh = ZH_SHAPE[shape], ZH_COLOUR[colour]
    return _nth(
        i // 3 + i,
        f"去掉图中的{zh}色{zh_shape}贴纸",
        f"Remove the {colour} {shape} sticker",
        f"移除{zh}色{zh_shape}，恢复后面的画面",
        f"Erase the {colour} {shape} and restore what is behind it",
        f"把 {colour} 色的{zh_shape}贴纸去掉",
    )


def replace_background(i: int) -> str:
    return _nth(
        i,
        "把图1的背景换成图2",
        "Replace the background of picture 1 with picture 2",
        "将图1的主体放到图2的背景前",
        "Put the subject of picture 1 in front of picture 2",
        "用 picture 2 作为图1主体的新背景",
    )


def side_by_side(i: int, count: int) -> str:
    if count == 2:
        return _nth(
            i,
            "左半边用图1，右半边用图2，拼成一张",
            "Join the left half of picture 1 and the right half of picture 2",
            "左边图1，右边图2，拼接 side by side",
        )
    return _nth(
        i,
        "左边用图1，中间用图2，右边用图3，拼成一张",
        "Join strips of pictures 1, 2 and 3 from left to right",
        "从左到右拼接图1、图2、图3，side by side",
    )


def compose_tone(i: int) -> str:
    return _nth(
        i,
        "把图1的主体放到图2前面，整体用图3的色调",
        "Put the subject of picture 1 on picture 2 in the colour tone of picture 3",
        "图1的主体，图2的背景，图3的 colour tone",
    )
