//! A terminal for programs that draw: a pseudo-terminal, and what would be seen on it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, ioctl_tiocsctty, kill_process, setsid};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::DEADLINE;

/// A program in a terminal of its own; it is killed when this is dropped.
pub struct Terminal {
    child: Child,
    keyboard: File,
    shown: Arc<Mutex<Screen>>,
}

/// What is seen, and what the program has made of the terminal.
#[derive(Clone, Debug, Default)]
pub struct Screen {
    columns: usize,
    rows: usize,
    cells: BTreeMap<(usize, usize), char>,
    row: usize,
    column: usize,
    /// An escape sequence that has not ended yet.
    pending: String,
    modes: BTreeMap<String, bool>,
    /// All text, also what is not seen any more.
    pub written: String,
    /// Something was written beyond the right edge, or below the bottom.
    pub overflowed: bool,
}

impl Terminal {
    /// Starts the program in a terminal of this size.
    pub fn start(command: &mut Command, (columns, rows): (u16, u16)) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a pseudo-terminal");
        grantpt(&master).and_then(|()| unlockpt(&master)).expect("a pseudo-terminal of our own");
        let inside = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("its other end");
        let shown = Arc::new(Mutex::new(Screen { modes: BTreeMap::from([("25".to_owned(), true)]), ..Screen::default() }));
        command.env("TERM", "xterm-256color").env("LC_ALL", "C.UTF-8").env("PYTHONUTF8", "1");
        for stream in [Command::stdin, Command::stdout, Command::stderr] {
            stream(command, inside.try_clone().expect("a handle"));
        }
        own_the_terminal(command);
        let mut terminal = Self { child: command.spawn().expect("it starts"), keyboard: master.into(), shown };
        terminal.resize(columns, rows);
        let (mut output, shown) = (terminal.keyboard.try_clone().expect("a handle"), terminal.shown.clone());
        std::thread::spawn(move || {
            let (mut bytes, mut held) = ([0; 65536], Vec::new());
            // The end of the last one inside is an error here.
            while let Ok(length @ 1..) = output.read(&mut bytes) {
                held.extend_from_slice(&bytes[..length]);
                let whole = held.utf8_chunks().next().map_or(0, |chunk| chunk.valid().len());
                let text = String::from_utf8(held.drain(..whole).collect()).expect("it is valid");
                shown.lock().unwrap().write(&text);
            }
        });
        terminal
    }

    /// Another size, as when a window is dragged.
    pub fn resize(&mut self, columns: u16, rows: u16) {
        let mut shown = self.shown.lock().unwrap();
        (shown.columns, shown.rows) = (columns.into(), rows.into());
        let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.keyboard, size).expect("our own terminal");
    }

    /// Presses keys; `\x03` is Ctrl-C.
    pub fn keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("our own terminal");
    }

    /// Sends the program a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("our own child");
    }

    /// What is seen now.
    pub fn screen(&self) -> Screen {
        self.shown.lock().unwrap().clone()
    }

    /// Waits until what is seen is so, and gives it; panics with it after [`DEADLINE`].
    pub async fn until(&self, what: &str, so: impl Fn(&Screen) -> bool) -> Screen {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let screen = self.screen();
            if so(&screen) {
                return screen;
            }
            assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}; it shows\n{}", screen.text());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// How the program ended; panics if it has not after [`DEADLINE`].
    pub async fn end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().expect("our own child") {
                return status;
            }
            assert!(Instant::now() < deadline, "it runs on; it shows\n{}", self.screen().text());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[allow(unsafe_code, reason = "std has no safe way to run something between fork and exec; what runs are two system calls")]
fn own_the_terminal(command: &mut Command) {
    // SAFETY: setsid(2) and ioctl(2) are async-signal-safe and touch no memory of the parent.
    unsafe {
        command.pre_exec(|| {
            setsid()?;
            Ok(ioctl_tiocsctty(rustix::stdio::stdin())?)
        });
    }
}

impl Screen {
    /// The lines that are seen, without what is blank at their ends.
    pub fn lines(&self) -> Vec<String> {
        let line = |row| (0..self.columns).map(|column| self.cells.get(&(row, column)).unwrap_or(&' ')).collect::<String>();
        (0..self.rows).map(|row| line(row).trim_end().to_owned()).collect()
    }

    /// The same in one.
    pub fn text(&self) -> String {
        self.lines().join("\n")
    }

    /// The line that holds this text.
    pub fn line(&self, with: &str) -> Option<String> {
        self.lines().into_iter().find(|line| line.contains(with))
    }

    /// Whether a mode such as `?1049`, the other screen, is set.
    pub fn is_set(&self, mode: &str) -> bool {
        self.modes.get(mode.trim_start_matches('?')).copied().unwrap_or(false)
    }

    fn write(&mut self, text: &str) {
        self.written.push_str(text);
        for char in text.chars() {
            match (self.pending.as_str(), char) {
                ("", '\u{1b}') => self.pending.push(char),
                ("", '\r') => self.column = 0,
                ("", '\n') => self.row += 1,
                ("", _) => {
                    // Without wrapping, what is beyond the edge is all in the last column.
                    self.overflowed |= self.column >= self.columns || self.row >= self.rows;
                    let column = self.column.min(self.columns.saturating_sub(1));
                    self.cells.insert((self.row, column), char);
                    self.column += 1;
                }
                (_, '[' | '?' | ';' | '0'..='9') => self.pending.push(char),
                (_, last) => {
                    let sequence = std::mem::take(&mut self.pending);
                    self.obey(sequence.trim_start_matches("\u{1b}["), last);
                }
            }
        }
    }

    /// An escape sequence. What a program may not use here is a panic of the reading thread, and nothing more is seen.
    fn obey(&mut self, arguments: &str, last: char) {
        let (row, column) = (self.row, self.column);
        match (arguments, last) {
            ("", 'H') => (self.row, self.column) = (0, 0),
            ("", 'K') => self.cells.retain(|at, _| at.0 != row || at.1 < column),
            ("", 'J') => self.cells.retain(|at, _| *at < (row, column)),
            ("2", 'J') => self.cells.clear(),
            (_, 'm') => {}
            (mode, 'h' | 'l') => _ = self.modes.insert(mode.trim_start_matches('?').to_owned(), last == 'h'),
            _ => panic!("an escape sequence that is not known here: {arguments:?} {last:?}"),
        }
    }
}
