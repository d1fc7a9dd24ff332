// The try-it box of a service's page. The conversation is kept here, in the page, and sent whole with every turn;
// the server adds the key, checks the form, and streams the answer as events.
"use strict";
(() => {
  const $ = (selector, from) => from.querySelector(selector);
  const made = (tag, className, text = "") => Object.assign(document.createElement(tag), { className, textContent: text });

  const isJson = (text) => { try { JSON.parse(text); return true; } catch { return false; } };

  class Refused extends Error {}

  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      for (let end; (end = buffer.indexOf("\n\n")) >= 0; buffer = buffer.slice(end + 2)) {
        const lines = buffer.slice(0, end).split("\n");
        const field = (name) => (lines.find((line) => line.startsWith(`${name}: `)) || "").slice(name.length + 2);
        yield { name: field("event"), data: JSON.parse(field("data") || "{}") };
      }
    }
  }

  // What a page or a program is told of an error, as its sentence.
  async function sentence(answer) {
    const text = await answer.text();
    try { return JSON.parse(text).error.message; } catch { /* a part of a page */ }
    const page = new DOMParser().parseFromString(text, "text/html");
    const code = page.querySelector("[role=alert] strong");
    if (code) code.remove();
    return page.body.textContent.trim().replace(/\s+/g, " ") || `the server answered ${answer.status}`;
  }

  function tryIt(form) {
    const part = (name) => $(`[data-try-${name}]`, form);
    const note = part("note"), problem = part("problem"), stop = part("stop"), go = part("go"), anew = part("anew");
    const turns = part("turns"), results = part("results"), message = form.elements.message;
    const CSRF = form.elements.csrf_token.value;
    let said = [];  // the messages so far, without the system's
    let open = [];  // the last answer's calls, which wait for their results
    let control = null;

    const chats = () => form.elements.kind.value === "chat";
    const say = (text) => { note.textContent = text; };
    const complain = (text) => { problem.textContent = text; problem.hidden = !text; note.hidden = !!text; };

    // One request. `seen` gets each event; the last one is returned. Throws Refused with a sentence.
    async function ask(route, fields, seen) {
      const began = performance.now(), body = new FormData();
      for (const [name, value] of Object.entries({ ...fields, ...common() })) body.set(name, value);
      let first = 0;
      const answer = await fetch(`${form.dataset.try}/${route}`, {
        method: "POST", body, signal: control.signal, headers: { "X-CSRF-Token": CSRF, "HX-Request": "true" },
      });
      if (!answer.ok) throw new Refused(await sentence(answer));
      for await (const { name, data } of events(answer)) {
        if (name === "failed") throw new Refused(data.message);
        if (name === "done") {
          const seconds = ((performance.now() - began) / 1000).toFixed(1);
          const cut = data.finish === "length" ? "; it ends there because of “Most tokens”" : "";
          say(`${data.tokens ? data.tokens + " tokens, " : ""}first after ${Math.round(first)} ms, ${seconds} s in all${cut}`);
          return;
        }
        first ||= performance.now() - began;
        say("writing…");
        seen(name, data);
      }
      throw new Refused("the stream ended early; try again");
    }
    const common = () => Object.fromEntries(
      ["adapter", "max_tokens", "temperature"].filter((name) => form.elements[name]).map((name) => [name, form.elements[name].value]));

    // -- completion -------------------------------------------------------------------------------------
    async function complete() {
      const out = part("answer"), prompt = form.elements.prompt.value;
      out.hidden = false;
      out.replaceChildren(made("b", "", prompt));
      await ask("complete", { prompt }, (_, data) => out.append(data.text));
    }

    // -- chat -------------------------------------------------------------------------------------------
    function turn(who, className, text = "") {
      const box = made("div", `turn ${className}`), body = made("div", "said", text);
      box.append(made("small", "", who), body);
      turns.append(box);
      turns.hidden = anew.hidden = false;
      turns.scrollTop = turns.scrollHeight;
      return { box, body };
    }
    const shown = (call) => `${call.function.name}(${call.function.arguments})`;

    // Fields for the results of calls: an answer goes on only when each call has one.
    function wait(calls) {
      open = calls;
      results.replaceChildren(...calls.map((call) => {
        const label = made("label", "", `Result of ${shown(call)} `);
        label.append(Object.assign(made("textarea", "code"), { rows: 2, required: true, maxLength: 20000, spellcheck: false }));
        return label;
      }));
      results.hidden = calls.length === 0;
      message.required = calls.length === 0;
    }

    async function chat() {
      const text = message.value, before = said, waited = open, pages = [];
      const given = [...results.querySelectorAll("textarea")].map((field) => field.value);
      said = [...said];
      open.forEach((call, i) => {
        said.push({ role: "tool", tool_call_id: call.id, content: given[i] });
        pages.push(turn(`result of ${call.function.name}`, "result", given[i]));
      });
      if (text.trim()) {
        said.push({ role: "user", content: text });
        pages.push(turn("you", "user", text));
      }
      wait([]);
      message.value = "";
      const { box, body } = turn("model", "model");
      const answer = { role: "assistant", content: "" }, calls = [], lines = [];
      const seen = (name, data) => {
        const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
        if (name === "token") {
          answer.content += data.text;
          body.append(data.text);
        } else if (name === "call") {
          const call = calls[data.index] ||= { id: "", type: "function", function: { name: "", arguments: "" } };
          call.id ||= data.id;
          call.function.name ||= data.name;
          call.function.arguments += data.arguments;
          if (!lines[data.index]) box.append(lines[data.index] = made("code", "call"));
          lines[data.index].textContent = shown(call);
        }
        if (atEnd) turns.scrollTop = turns.scrollHeight;
      };
      const system = form.elements.system.value;
      const messages = JSON.stringify(system.trim() ? [{ role: "system", content: system }, ...said] : said);
      const fields = { messages, tools: form.elements.tools.value, tool_choice: form.elements.tool_choice.value, answer_schema: form.elements.answer_schema.value };
      try {
        await ask("chat", fields, seen);
        const whole = calls.filter(Boolean);
        for (const call of whole) call.function.arguments ||= "{}";
        if (!whole.every((call) => isJson(call.function.arguments))) throw new Refused("the answer ended inside a tool call; raise “Most tokens”");
        if (whole.length) answer.tool_calls = whole;
        said.push(answer);
        wait(whole);
      } catch (error) {
        if (error.name === "AbortError" && answer.content) {  // what was read stays said; a call without its end does not
          lines.forEach((line) => line.remove());
          said.push(answer);
          throw error;
        }
        // As if it had not been asked: the texts go back into their fields.
        said = before;
        for (const page of [...pages, { box }]) page.box.remove();
        turns.hidden = anew.hidden = said.length === 0;
        wait(waited);
        [...results.querySelectorAll("textarea")].forEach((field, i) => { field.value = given[i]; });
        message.value = text;
        throw error;
      }
    }

    // -- both -------------------------------------------------------------------------------------------
    async function submit(event) {
      event.preventDefault();
      if (control) return;
      control = new AbortController();
      go.disabled = anew.disabled = true;
      stop.hidden = false;
      complain("");
      say("waiting for the first token…");
      try {
        await (chats() ? chat() : complete());
      } catch (error) {
        if (error.name === "AbortError") say("stopped");
        else complain(error instanceof Refused ? error.message : "the connection broke; try again");
      } finally {
        control = null;
        go.disabled = anew.disabled = false;
        stop.hidden = true;
        if (chats()) (results.querySelector("textarea") || message).focus({ preventScroll: true });
      }
    }
    function choose() {
      for (const name of ["chat", "complete"]) {
        const set = $(`[data-try-part=${name}]`, form);
        set.hidden = set.disabled = (name === "chat") !== chats();
      }
      go.textContent = chats() ? "Send" : "Complete";
      anew.hidden = !chats() || said.length === 0;
    }

    form.addEventListener("submit", submit);
    form.querySelectorAll("[name=kind]").forEach((radio) => radio.addEventListener("change", choose));
    message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    stop.addEventListener("click", () => control && control.abort());
    anew.addEventListener("click", () => {
      said = [];
      wait([]);
      turns.replaceChildren();
      turns.hidden = anew.hidden = true;
      complain("");
      say("");
      message.focus();
    });
    choose();  // a browser that goes back restores what was chosen
  }

  document.querySelectorAll("[data-try]").forEach(tryIt);
})();
