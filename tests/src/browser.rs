//! A real browser without a window, asked over WebDriver: plain HTTP and JSON to the `chromedriver` of this machine.
//!
//! It is for pages that stand in files. Nothing is fetched from a network, and each browser has a fresh profile that is gone with it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// How long any one thing may take, on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(240);
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// A browser with one tab. It ends when this is dropped.
pub struct Browser {
    driver: Child,
    port: u16,
    session: Option<String>,
    profile: PathBuf,
}

impl Browser {
    /// Starts a browser, with a profile under `folder`.
    ///
    /// # Errors
    /// Why there is none on this machine.
    pub fn open(folder: &Path) -> Result<Self, String> {
        let program = BROWSERS.iter().find_map(|name| find(name));
        let program = program.ok_or_else(|| format!("none of {} is in PATH", BROWSERS.join(", ")))?;
        let driver = find("chromedriver").ok_or("chromedriver is not in PATH")?;
        let profile = folder.join(format!("profile-{}", std::process::id()));
        std::fs::create_dir_all(&profile).map_err(|e| format!("{}: {e}", profile.display()))?;
        // It chooses a free port, and says which.
        let mut driver = Command::new(driver)
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("chromedriver can't be started: {e}"))?;
        let port = port(&mut driver);
        let mut browser = Self { driver, port: port.unwrap_or(0), session: None, profile };
        if port.is_none() {
            return Err("chromedriver named no port".into());
        }
        let answer = browser.ask("POST", "/session", &capabilities(&program, &browser.profile))?;
        let session = answer.pointer("/sessionId").and_then(Value::as_str);
        browser.session = Some(session.ok_or_else(|| format!("no session: {answer}"))?.to_owned());
        // Its first page is one of its own, which asks for much; that is no page's of the caller.
        browser.tell("url", &json!({"url": "about:blank"}))?;
        browser.requests()?;
        browser.complaints()?;
        Ok(browser)
    }

    /// Opens a file, and returns when it has been loaded.
    ///
    /// # Errors
    /// What the driver said.
    pub fn go(&self, file: &Path) -> Result<(), String> {
        self.tell("url", &json!({"url": format!("file://{}", file.display())})).map(|_| ())
    }

    /// Runs a function's body in the page; what it returns.
    ///
    /// # Errors
    /// What the driver said, e.g. the error of the script.
    pub fn run(&self, script: &str) -> Result<Value, String> {
        self.tell("execute/sync", &json!({"script": script, "args": []}))
    }

    /// Makes the page so wide and high, in a light or a dark scheme of colours.
    ///
    /// # Errors
    /// What the driver said.
    pub fn look(&self, width: u32, height: u32, dark: bool) -> Result<(), String> {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.tool("Emulation.setDeviceMetricsOverride", &size)?;
        let scheme = json!({"name": "prefers-color-scheme", "value": if dark { "dark" } else { "light" }});
        self.tool("Emulation.setEmulatedMedia", &json!({"features": [scheme]})).map(|_| ())
    }

    /// The whole page as a PNG.
    ///
    /// # Errors
    /// What the driver said.
    pub fn picture(&self) -> Result<Vec<u8>, String> {
        let answer = self.tool("Page.captureScreenshot", &json!({"format": "png", "captureBeyondViewport": true}))?;
        let data = answer.get("data").and_then(Value::as_str).ok_or("no picture")?;
        data_encoding::BASE64.decode(data.as_bytes()).map_err(|e| e.to_string())
    }

    /// What the page wrote to its console and what was wrong with it, since the last time.
    ///
    /// # Errors
    /// What the driver said.
    pub fn complaints(&self) -> Result<Vec<String>, String> {
        self.log("browser", |entry| Some(entry.get("message")?.as_str()?.to_owned()))
    }

    /// The addresses that were asked for, since the last time.
    ///
    /// # Errors
    /// What the driver said.
    pub fn requests(&self) -> Result<Vec<String>, String> {
        self.log("performance", |entry| {
            let message: Value = serde_json::from_str(entry.get("message")?.as_str()?).ok()?;
            let event = message.get("message")?;
            let asked = event.get("method")?.as_str()? == "Network.requestWillBeSent";
            asked.then(|| event.pointer("/params/request/url")?.as_str().map(str::to_owned))?
        })
    }

    fn log(&self, kind: &str, read: impl Fn(&Value) -> Option<String>) -> Result<Vec<String>, String> {
        let entries = self.tell("se/log", &json!({"type": kind}))?;
        Ok(entries.as_array().into_iter().flatten().filter_map(read).collect())
    }

    /// Asks the browser's own tools for developers.
    fn tool(&self, command: &str, params: &Value) -> Result<Value, String> {
        self.tell("goog/cdp/execute", &json!({"cmd": command, "params": params}))
    }

    fn tell(&self, what: &str, body: &Value) -> Result<Value, String> {
        let session = self.session.as_deref().unwrap_or_default();
        self.ask("POST", &format!("/session/{session}/{what}"), body)
    }

    /// One request and its answer, by HTTP.
    fn ask(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let answer = exchange(self.port, method, path, &body.to_string()).map_err(|e| format!("chromedriver: {e}"))?;
        let answer: Value = serde_json::from_str(&answer).map_err(|e| format!("chromedriver: {e} in {answer}"))?;
        let value = answer.get("value").cloned().unwrap_or_default();
        match value.get("error") {
            Some(error) => Err(format!("{error}: {}", value.get("message").unwrap_or(&Value::Null))),
            None => Ok(value),
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            drop(self.ask("DELETE", &format!("/session/{session}"), &json!({})));
        }
        drop(self.driver.kill());
        drop(self.driver.wait());
        drop(std::fs::remove_dir_all(&self.profile));
    }
}

fn find(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(name)).find(|file| file.is_file())
}

fn port(driver: &mut Child) -> Option<u16> {
    let mut lines = BufReader::new(driver.stdout.take()?).lines();
    let line = lines.by_ref().map_while(Result::ok).find(|line| line.contains("started successfully on port"))?;
    // What it writes later has to go somewhere.
    std::thread::spawn(move || lines.map_while(Result::ok).count());
    line.trim_end_matches('.').rsplit(' ').next()?.parse().ok()
}

fn capabilities(program: &Path, profile: &Path) -> Value {
    let profile = format!("--user-data-dir={}", profile.display());
    let args = [
        "--headless=new",
        // Tests may run as root, and in containers with little shared memory.
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--force-color-profile=srgb",
        "--hide-scrollbars",
        &profile,
    ];
    json!({"capabilities": {"alwaysMatch": {
        "browserName": "chrome",
        "timeouts": {"script": PATIENCE.as_millis(), "pageLoad": PATIENCE.as_millis()},
        "goog:chromeOptions": {"binary": program, "args": args},
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }}})
}

fn exchange(port: u16, method: &str, path: &str, body: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )?;
    let mut reader = BufReader::new(stream);
    let mut length = 0usize;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim_end().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().map_err(std::io::Error::other)?;
        }
    }
    let mut text = String::new();
    reader.take(length as u64).read_to_string(&mut text)?;
    Ok(text)
}
