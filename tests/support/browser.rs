//! A real browser: Debian's Chromium without a window, steered over its DevTools protocol.
//!
//! `scripts/test` fetches it and says where it is (`need_browser` in `scripts/tools`). The protocol goes through its pipe: JSON with a NUL behind each
//! message, so that nothing but the page's own requests is on the network.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::oneshot;

use crate::DEADLINE;
use crate::envoy::die_with_parent;

/// What a page says on a machine that is busy; the first one also waits for the browser.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running browser; it ends when dropped, and with the thread that started it.
pub struct Browser {
    wire: Arc<Wire>,
    child: Child,
    _profile: TempDir,
}

struct Wire {
    to: tokio::sync::Mutex<ChildStdin>,
    asked: AtomicU64,
    awaited: Mutex<HashMap<u64, oneshot::Sender<Value>>>,
    /// All that pages reported, in its order.
    events: Mutex<Vec<Value>>,
}

/// How a page is looked at.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// In CSS pixels.
    pub size: (u32, u32),
    /// Whether it is a phone.
    pub is_phone: bool,
    /// `prefers-color-scheme: dark`.
    pub is_dark: bool,
    /// `prefers-reduced-motion: reduce`.
    pub is_still: bool,
}

impl View {
    /// A window of this size.
    pub fn window(width: u32, height: u32) -> Self {
        Self { size: (width, height), is_phone: false, is_dark: false, is_still: false }
    }

    /// A phone, upright, 360 pixels wide.
    pub fn phone() -> Self {
        Self { size: (360, 740), is_phone: true, is_dark: false, is_still: false }
    }

    /// The same in the dark.
    pub fn dark(self) -> Self {
        Self { is_dark: true, ..self }
    }

    /// The same for whom movement disturbs.
    pub fn still(self) -> Self {
        Self { is_still: true, ..self }
    }
}

impl Browser {
    /// Starts it. Panics where there is none: tests that need it are ignored unless `scripts/test` has one.
    pub async fn start() -> Self {
        let binary = std::env::var_os("PLIMSOLL_CHROMIUM").map(PathBuf::from);
        let binary =
            binary.expect("PLIMSOLL_CHROMIUM names no browser: run scripts/test, or source scripts/tools and call need_browser");
        let profile = tempfile::Builder::new().prefix("plimsoll-browser-").tempdir().expect("a temporary directory");
        let mut command = std::process::Command::new("sh");
        // Chromium reads the protocol from descriptor 3 and writes it to 4.
        command.args(["-c", "exec 3<&0 4>&1 </dev/null >/dev/null; exec \"$@\"", "sh"]).arg(&binary);
        command.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-extensions",
        ]);
        command.args([
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        if let Some(libraries) = std::env::var_os("PLIMSOLL_CHROMIUM_LIBRARIES").filter(|libraries| !libraries.is_empty()) {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        // Fonts that were fetched with it.
        if let Some(data) = binary.ancestors().nth(3).map(|usr| usr.join("share")).filter(|share| share.join("fonts").is_dir()) {
            command.env("XDG_DATA_HOME", data);
        }
        let log = std::fs::File::create(profile.path().join("log")).expect("a file in a fresh directory");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        die_with_parent(&mut command, Signal::KILL);
        let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn().expect("the browser runs");
        let (to, from) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let wire = Wire {
            to: tokio::sync::Mutex::new(to),
            asked: AtomicU64::new(0),
            awaited: Mutex::default(),
            events: Mutex::default(),
        };
        let wire = Arc::new(wire);
        tokio::spawn(wire.clone().listen(from));
        Self { wire, child, _profile: profile }
    }

    /// Opens an address.
    pub async fn open(&self, address: &str, view: View) -> Tab {
        let target = self.wire.ask("", "Target.createTarget", json!({"url": "about:blank"})).await;
        let attached = self.wire.ask("", "Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true})).await;
        let session = attached["sessionId"].as_str().expect("a session").to_owned();
        let tab = Tab { wire: self.wire.clone(), session };
        for domain in ["Page", "Runtime", "Log", "Network"] {
            tab.ask(&format!("{domain}.enable"), json!({})).await;
        }
        tab.look(view).await;
        let opened = tab.ask("Page.navigate", json!({"url": address})).await;
        assert!(opened["errorText"].is_null(), "{address}: {opened}");
        tab.until("it is loaded", "location.href !== 'about:blank' && document.readyState === 'complete'").await;
        tab
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.start_kill();
    }
}

impl Wire {
    async fn listen(self: Arc<Self>, from: ChildStdout) {
        let (mut from, mut message) = (BufReader::new(from), Vec::new());
        while from.read_until(0, &mut message).await.is_ok_and(|read| read > 0) {
            message.pop();
            let mut said: Value = serde_json::from_slice(&message).expect("the browser speaks JSON");
            message.clear();
            match said["id"].as_u64() {
                Some(id) => {
                    if let Some(waits) = self.awaited.lock().expect("not poisoned").remove(&id) {
                        let _ = waits.send(said.take());
                    }
                }
                None => self.events.lock().expect("not poisoned").push(said),
            }
        }
    }

    async fn ask(&self, session: &str, method: &str, parameters: Value) -> Value {
        let id = self.asked.fetch_add(1, Ordering::Relaxed);
        let (send, receive) = oneshot::channel();
        self.awaited.lock().expect("not poisoned").insert(id, send);
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if !session.is_empty() {
            message["sessionId"] = json!(session);
        }
        let bytes = [message.to_string().as_bytes(), b"\0"].concat();
        self.to.lock().await.write_all(&bytes).await.expect("the browser reads");
        let answer = tokio::time::timeout(PATIENCE, receive).await;
        let mut answer = answer
            .unwrap_or_else(|_| panic!("{method}: no answer from the browser within {PATIENCE:?}"))
            .expect("the browser lives");
        assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
        answer["result"].take()
    }
}

/// An open page.
pub struct Tab {
    wire: Arc<Wire>,
    session: String,
}

impl Tab {
    async fn ask(&self, method: &str, parameters: Value) -> Value {
        self.wire.ask(&self.session, method, parameters).await
    }

    /// Looks at it in another way from now on.
    pub async fn look(&self, view: View) {
        let (width, height) = view.size;
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": view.is_phone});
        self.ask("Emulation.setDeviceMetricsOverride", metrics).await;
        let scheme = json!({"name": "prefers-color-scheme", "value": if view.is_dark { "dark" } else { "light" }});
        let motion = json!({"name": "prefers-reduced-motion", "value": if view.is_still { "reduce" } else { "no-preference" }});
        self.ask("Emulation.setEmulatedMedia", json!({"features": [scheme, motion]})).await;
    }

    /// What an expression gives on the page.
    pub async fn eval(&self, expression: &str) -> Value {
        let mut answer =
            self.ask("Runtime.evaluate", json!({"expression": expression, "returnByValue": true, "awaitPromise": true})).await;
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].take()
    }

    /// The text of the first element of this kind, with plain spaces; null if there is none.
    pub async fn text(&self, selector: &str) -> Value {
        self.eval(&format!("document.querySelector({selector:?})?.textContent.replaceAll('\\u00a0', ' ') ?? null")).await
    }

    /// Waits until an expression is true on the page.
    pub async fn until(&self, what: &str, expression: &str) {
        let deadline = Instant::now() + DEADLINE;
        while self.eval(&format!("Boolean({expression})")).await != true {
            assert!(
                Instant::now() < deadline,
                "not within {DEADLINE:?}: {what}; the page says: {}",
                self.eval("document.body.innerText").await
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Presses a key (`Tab`, `Enter`, `ArrowRight`).
    pub async fn press(&self, key: &str) {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            "End" => 35,
            "Home" => 36,
            "ArrowLeft" => 37,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            _ => panic!("{key}: not among the keys that are known here"),
        };
        for kind in ["rawKeyDown", "keyUp"] {
            self.ask("Input.dispatchKeyEvent", json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}))
                .await;
        }
    }

    /// Writes a picture of the whole page to a file, as PNG.
    pub async fn picture(&self, file: &Path) {
        let shot = self.ask("Page.captureScreenshot", json!({"format": "png", "captureBeyondViewport": true})).await;
        let bytes = plimsoll::telemetry::base64::decode(shot["data"].as_str().expect("a picture").as_bytes());
        std::fs::write(file, bytes.expect("base64")).expect("a file that can be written");
    }

    /// Every request that the page has made.
    pub fn requests(&self) -> Vec<String> {
        self.events(&["Network.requestWillBeSent"])
            .iter()
            .map(|sent| sent["request"]["url"].as_str().unwrap_or_default().to_owned())
            .collect()
    }

    /// Errors, warnings, uncaught exceptions, and what the browser itself complained of: violations of the page's policy, requests that failed.
    pub fn complaints(&self) -> Vec<String> {
        let reported = self.events(&["Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"]);
        reported
            .iter()
            .filter(|what| what["type"] != "log" && what["entry"]["level"] != "verbose")
            .map(Value::to_string)
            .collect()
    }

    fn events(&self, kinds: &[&str]) -> Vec<Value> {
        let all = self.wire.events.lock().expect("not poisoned");
        let ours =
            all.iter().filter(|said| said["sessionId"] == self.session && kinds.iter().any(|kind| said["method"] == *kind));
        ours.map(|said| said["params"].clone()).collect()
    }
}
