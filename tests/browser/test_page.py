"""The chat page as people use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import Browser, Page, expect

import aiocb
from aiocb.testing import Gate, fake_engine

Serve = Callable[..., Any]


def ask(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.keyboard.press("Enter")


def answered(page: Page) -> None:
    expect(page.locator("#send")).to_be_visible()


def answers(page: Page) -> Any:
    return page.locator(".answer .text")


def test_a_real_model_streams(page: Page, serve: Serve) -> None:
    server = serve(aiocb.Engine.from_pretrained("smollm2"), served_model_name=("smollm2",))
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text("smollm2")
    page.click("#tune")
    page.locator('[data-set="0"] input[name="max_tokens"]').fill("30")
    ask(page, "What is the capital of France?")
    expect(answers(page).first).not_to_be_empty()
    answered(page)
    expect(page.locator(".facts").first).to_contain_text("tokens/s")
    ask(page, "And of Italy?")
    answered(page)
    expect(page.locator(".facts").nth(1)).to_contain_text("from cache")
    expect(page.locator(".error:visible")).to_have_count(0)


def test_markdown_and_code(page: Page, serve: Serve) -> None:
    text = (
        "# Title\n\nSome *soft* and **loud** words.\n\n```python\nprint('hi')\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n- x\n- y\n"
    )
    server = serve(fake_engine(reply=text))
    page.goto(server.url)
    ask(page, "Hi")
    answered(page)
    answer = answers(page).first
    expect(answer.locator("h1")).to_have_text("Title")
    expect(answer.locator("strong")).to_have_text("loud")
    expect(answer.locator("pre code")).to_have_text("print('hi')\n")
    expect(answer.locator("td").first).to_have_text("1")
    expect(answer.locator("li")).to_have_count(2)


def test_stop_keeps_the_part(page: Page, serve: Serve) -> None:
    server = serve(fake_engine(step_time=0.01))
    page.goto(server.url)
    ask(page, "Hi")
    expect(answers(page).first).not_to_be_empty()
    page.keyboard.press("Escape")
    answered(page)
    expect(page.locator(".facts").first).to_contain_text("stopped")
    assert len(answers(page).first.inner_text()) > 0
    for _ in range(100):
        stats = page.request.get(f"{server.url}stats").json()
        if stats["num_requests_running"] == 0:
            break
        page.wait_for_timeout(20)
    assert stats["num_requests_running"] == 0
    assert stats["num_aborts"] == 1


def test_regenerate_and_edit(page: Page, serve: Serve) -> None:
    count = 0

    def reply(prompt: str) -> str:
        nonlocal count
        count += 1
        return f"answer {count} to {prompt.count('<|user|>')} questions, last: {prompt.split('<|user|>')[-1][:6]}"

    server = serve(fake_engine(reply=reply))
    page.goto(server.url)
    ask(page, "first")
    answered(page)
    expect(answers(page).first).to_contain_text("answer 1 to 1")
    page.click(".again")
    answered(page)
    expect(answers(page).first).to_contain_text("answer 2 to 1")
    ask(page, "second")
    answered(page)
    expect(answers(page).nth(1)).to_contain_text("answer 3 to 2")
    page.locator(".edit").first.click()
    box = page.locator(".editing textarea")
    expect(box).to_be_focused()
    box.fill("third")
    page.keyboard.press("Enter")
    answered(page)
    expect(answers(page)).to_have_count(1)
    expect(answers(page).first).to_contain_text("answer 4 to 1 questions, last: third")


def test_two_answers_side_by_side(page: Page, serve: Serve) -> None:
    asked: list[Any] = []
    server = serve(fake_engine())
    page.goto(server.url)
    page.on("request", lambda r: asked.append(r.post_data_json) if r.method == "POST" else None)
    page.click("#compare")
    page.locator('[data-set="0"] input[name="max_tokens"]').fill("5")
    page.locator('[data-set="1"] input[name="max_tokens"]').fill("9")
    page.locator('[data-set="1"] input[name="temperature"]').fill("1.5")
    ask(page, "Hi")
    answered(page)
    assert sorted(body["max_tokens"] for body in asked) == [5, 9]
    assert {body["temperature"] for body in asked} == {0.7, 1.5}
    expect(answers(page)).to_have_count(2)
    left, right = page.locator(".answer").nth(0).bounding_box(), page.locator(".answer").nth(1).bounding_box()
    assert left and right and right["x"] > left["x"] + left["width"] - 1
    second = answers(page).nth(1).inner_text()
    page.locator(".pick:visible").click()
    page.click("#compare")
    asked.clear()
    ask(page, "More")
    answered(page)
    assert asked[0]["messages"][1]["content"] == second


def test_what_a_model_prints_runs_nothing(page: Page, serve: Serve) -> None:
    evil = (
        "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'> "
        "[a](javascript:window.hacked=3) <a href='javascript:window.hacked=4'>b</a> "
        "[c](data:text/html,<script>window.hacked=5</script>) ![d](http://127.0.0.1:9/x.png) "
        "<svg onload='window.hacked=6'></svg> <iframe src='javascript:window.hacked=7'></iframe>\n\n"
        "<style>body{display:none}</style><div style='position:fixed;inset:0'>x</div>\n"
    )
    requests: list[str] = []
    server = serve(fake_engine(reply=evil))
    page.on("request", lambda r: requests.append(r.url))
    page.goto(server.url)
    ask(page, evil)
    answered(page)
    answer = answers(page).first
    for link in answer.locator("a").all():
        assert str(link.get_attribute("href")).startswith(("http:", "https:", "mailto:"))
    assert answer.locator("script, img, svg, iframe, style, [style], [onerror]").count() == 0
    expect(answer).to_contain_text("<script>")
    assert page.evaluate("window.hacked") is None
    assert answer.locator("a").count() > 0 or "javascript:" in answer.inner_text()
    page.reload()  # and drawn again from what was kept
    expect(answers(page).first).to_contain_text("<script>")
    assert page.evaluate("window.hacked") is None
    assert all(url.startswith(server.url) for url in requests)


def test_by_the_keyboard_alone(page: Page, serve: Serve) -> None:
    server = serve(fake_engine(reply="yes"))
    page.goto(server.url)
    expect(page.locator("#input")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    answered(page)
    expect(page.locator(".user .text")).to_have_text("one\ntwo")
    seen = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"new", "system", "theme"} <= seen
    assert any("again" in name for name in seen)
    assert any("edit" in name for name in seen)


def test_a_narrow_screen_does_not_scroll_sideways(browser: Browser, serve: Serve) -> None:
    wide = "x" * 400 + "\n\n```\n" + "code " * 60 + "\n```\n\n| " + "a | " * 30 + "\n|" + "---|" * 30 + "\n"
    server = serve(fake_engine(reply=wide))
    context = browser.new_context(viewport={"width": 360, "height": 640})
    page = context.new_page()
    page.goto(server.url)
    ask(page, "y" * 300)
    answered(page)
    page.click("#tune")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(
        "document.getElementById('scroll').scrollWidth <= document.getElementById('scroll').clientWidth"
    )
    page.click("#open-side")
    expect(page.locator("#new")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#new")).not_to_be_visible()
    context.close()


def test_nothing_jumps_while_an_answer_grows(page: Page, serve: Serve) -> None:
    text = "Some words.\n\n" + "".join(f"Paragraph {n} has a few words in it, and then some.\n\n" for n in range(12))
    server = serve(fake_engine(reply=text, step_time=0.001))
    page.goto(server.url)
    expect(page.locator("#f-running")).not_to_have_text("–")
    page.evaluate(
        """() => { window.shift = 0; new PerformanceObserver((list) => {
            for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
        }).observe({ type: "layout-shift", buffered: false }); }"""
    )
    ask(page, "Hi")
    answered(page)
    assert page.evaluate("window.shift") < 0.05
    where = "document.getElementById('scroll')"
    left = page.evaluate(f"{where}.scrollHeight - {where}.scrollTop - {where}.clientHeight")
    assert left < 60  # it has followed to the end


def test_chats_are_kept(page: Page, serve: Serve) -> None:
    server = serve(fake_engine(reply="kept"))
    page.goto(server.url)
    ask(page, "remember me")
    answered(page)
    page.reload()
    expect(page.locator(".user .text")).to_have_text("remember me")
    expect(answers(page).first).to_have_text("kept")
    page.click("#new")
    expect(page.locator("#empty")).to_be_visible()
    page.locator("#list .open", has_text="remember me").click()
    expect(answers(page).first).to_have_text("kept")
    page.locator("#list .icon").first.click()
    expect(page.locator("#empty")).to_be_visible()


def test_two_tabs_keep_each_other_s_chats(page: Page, serve: Serve) -> None:
    server = serve(fake_engine(reply="yes"))
    page.goto(server.url)
    other = page.context.new_page()
    other.goto(server.url)
    ask(page, "from the first")
    answered(page)
    ask(other, "from the second")
    answered(other)
    for tab in (page, other):
        expect(tab.locator("#list .open")).to_have_count(2)
        tab.reload()
        expect(tab.locator("#list .open")).to_have_count(2)
    page.locator("#list .row", has_text="from the first").locator(".icon").click()
    other.reload()
    expect(other.locator("#list .open")).to_have_count(1)


def test_a_question_without_an_answer_is_left_out(page: Page, serve: Serve) -> None:
    asked: list[Any] = []
    gate = Gate()
    server = serve(fake_engine(reply="yes", gate=gate))
    page.goto(server.url)
    page.on("request", lambda r: asked.append(r.post_data_json) if r.method == "POST" else None)
    ask(page, "first")
    expect(page.locator("#stop")).to_be_visible()
    page.keyboard.press("Escape")
    answered(page)
    gate.open()
    ask(page, "second")
    answered(page)
    assert [message["role"] for message in asked[-1]["messages"]] == ["user"]


def test_a_key_is_asked_for(page: Page, serve: Serve) -> None:
    server = serve(fake_engine(reply="yes"), api_key=("sesame",))
    page.goto(server.url)
    dialog = page.locator("#key")
    expect(dialog).to_be_visible()
    page.click("#key-cancel")
    looks: list[str] = []
    page.on("request", lambda r: looks.append(r.url) if r.url.endswith("health") else None)
    page.wait_for_timeout(2500)  # what is tested is how often it looks
    expect(dialog).not_to_be_visible()
    assert len(looks) <= 2
    ask(page, "Hi")  # needs one
    expect(dialog).to_be_visible()
    page.fill("#key-value", "sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("fake")
    ask(page, "Hi")
    answered(page)
    expect(answers(page).last).to_have_text("yes")


def test_a_server_that_dies_is_told_and_tried_again(page: Page, serve: Serve) -> None:
    gate = Gate(is_open=True)
    server = serve(fake_engine(step_time=0.01, gate=gate))
    page.goto(server.url)
    ask(page, "Hi")
    expect(answers(page).first).not_to_be_empty()
    server.kill()
    expect(page.locator(".error").first).to_be_visible()
    expect(page.locator(".again").first).to_have_text("Try again")
    expect(page.locator("#banner")).to_contain_text("cannot be reached")


def test_themes(page: Page, serve: Serve) -> None:
    server = serve(fake_engine(reply="yes"))
    page.goto(server.url)
    colours = []
    for _ in range(3):
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click("#theme")
    assert len(set(colours)) == 2
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == colours[0]
