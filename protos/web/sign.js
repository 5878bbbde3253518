// A person's decision is signed here, in the browser, with the person's own Ed25519 key: the DSSE pre-authentication
// encoding of the statement that the page shows in words. The script reads the very bytes, shows what they say, and signs
// nothing when the page's words say something else. The key file is read and never sent. Without this script the other
// way, to sign on another machine, stands open; it is the only way that a false console cannot change.
"use strict";
const bytes = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
const base64 = (raw) => btoa(Array.from(new Uint8Array(raw), (b) => String.fromCharCode(b)).join(""));
const hex = (raw) => Array.from(new Uint8Array(raw), (b) => b.toString(16).padStart(2, "0")).join("");

const TYPE = "application/vnd.in-toto+json";
const VERBS = { "https://lazaret.invalid/attestation/approval/v1": "approves", "https://lazaret.invalid/attestation/request/v1": "asks" };
const FIELDS = { person: "Who", verb: "Does", action: "Action", subject: "Of what", value: "Value", serial: "Proposal", origin: "Ledger" };

// What the bytes say, shown beside the button, word for word as the page says it; or nothing is signed.
const read = (form) => {
  const payload = bytes(form.dataset.statement);
  const statement = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(payload));
  const said = { ...statement.predicate, verb: VERBS[statement.predicateType] };
  const list = form.querySelector(".bytes dl");
  list.replaceChildren(...Object.entries(FIELDS).map(([name, label]) => {
    const row = document.createElement("div");
    row.append(document.createElement("dt"), document.createElement("dd"));
    row.firstChild.textContent = label;
    row.lastChild.textContent = String(said[name]);
    return row;
  }));
  form.querySelector(".bytes").hidden = false;
  const shown = form.closest(".sign").querySelector(".what");
  for (const name of Object.keys(FIELDS)) {
    const words = [...shown.querySelectorAll(`[data-said="${name}"]`)].map((place) => place.textContent);
    if (!words.length || words.some((text) => text !== said[name]) || form.dataset.payloadType !== TYPE) {
      throw new Error(`The bytes to be signed say something else than this page (${FIELDS[name]}). Nothing is signed: tell the operator, and sign on another machine.`);
    }
  }
  return payload;
};

const pae = (type, payload) => {
  const kind = new TextEncoder().encode(type);
  const head = new TextEncoder().encode(`DSSEv1 ${kind.length} ${type} ${payload.length} `);
  const out = new Uint8Array(head.length + payload.length);
  out.set(head);
  out.set(payload, head.length);
  return out;
};

const keyIn = async (file) => {
  if (!file || file.size > 4096) throw new Error("Choose the key file that `ledger person` made.");
  const text = await file.text();
  if (text.includes("ENCRYPTED")) throw new Error("That key is sealed with a passphrase: sign on another machine, below.");
  const found = /-----BEGIN PRIVATE KEY-----([\s\S]+?)-----END PRIVATE KEY-----/.exec(text);
  if (!found) throw new Error("That file holds no private key: choose the one that `ledger person` made.");
  try {
    return await crypto.subtle.importKey("pkcs8", bytes(found[1].replace(/\s+/g, "")), { name: "Ed25519" }, true, ["sign"]);
  } catch {
    throw new Error("That file holds no Ed25519 key: choose the one that `ledger person` made.");
  }
};

const publicOf = async (key) => {
  const x = (await crypto.subtle.exportKey("jwk", key)).x;
  return bytes(x.replaceAll("-", "+").replaceAll("_", "/") + "=");
};

const seal = async (form) => {
  const payload = read(form), type = TYPE;
  const key = await keyIn(form.querySelector("input.key").files[0]);
  const own = await publicOf(key);
  if (form.dataset.public && form.dataset.public !== base64(own)) {
    throw new Error("That is another person's key, or an older one: the ledger holds another public key for you.");
  }
  const keyid = hex(await crypto.subtle.digest("SHA-256", own));
  const sig = base64(await crypto.subtle.sign("Ed25519", key, pae(type, payload)));
  // canonical JSON: sorted keys, no spaces; the type is plain text without anything to escape
  return `{"payload":"${form.dataset.statement}","payloadType":"${type}","signatures":[{"keyid":"${keyid}","sig":"${sig}"}]}`;
};

for (const form of document.querySelectorAll("form.by-key")) {
  if (!globalThis.crypto || !crypto.subtle) break; // the other way stays: sign on another machine
  form.hidden = false;
  form.parentElement.querySelector("details[data-other]")?.removeAttribute("open");
  const wrong = form.querySelector(".error");
  try {
    read(form);
  } catch (problem) {
    wrong.textContent = problem.message;
    wrong.hidden = false;
  }
  form.addEventListener("submit", async (event) => {
    const sealed = form.elements.envelope;
    if (sealed.value) return;
    event.preventDefault();
    wrong.hidden = true;
    try {
      sealed.value = await seal(form);
      form.querySelector("input.key").value = ""; // it has no name and is not sent; nor is it kept
      form.requestSubmit(event.submitter);
      setTimeout(() => { sealed.value = ""; }, 0);
    } catch (problem) {
      wrong.textContent = problem.message;
      wrong.hidden = false;
      form.querySelector("input.key").focus();
    }
  });
}
