//! Lines of JSON between the benchmark and its client processes.

use std::io::{self, BufRead, Write};

use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The first line to a client: what all its requests have in common.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    /// The model's name.
    pub model: String,
    /// Seed of the prompts.
    pub seed: u64,
    /// Tokens that all prompts begin with.
    pub shared_tokens: u32,
    /// Tokens in the model's vocabulary.
    pub vocabulary: u32,
    /// Ids that no prompt contains: those that end an answer.
    pub left_out: Vec<u32>,
    /// JSON schema of all answers.
    pub schema: Option<String>,
}

/// A further line to a client: one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Counted from 0; the prompt depends on it.
    pub number: u64,
    /// When the request should begin, by [`now_us`]; `None`: at once.
    pub due_us: Option<u64>,
    /// Tokens of the prompt after the shared ones.
    pub prompt_tokens: u32,
    /// Tokens to generate.
    pub answer_tokens: u32,
}

/// A line from a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Told {
    /// It has its connection, or could not get one.
    Ready,
    /// A request ended.
    Ended(Sample),
}

/// How a request went. Times are those of [`now_us`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The job's number.
    pub number: u64,
    /// When it should have begun: the intended time of arrival, or the time of sending in a closed loop.
    pub due_us: u64,
    /// When it was sent.
    pub sent_us: u64,
    /// When the first token came.
    pub first_us: Option<u64>,
    /// When the answer or the error was complete.
    pub end_us: u64,
    /// Time between each token and the one before. Tokens that came together have 0 between them.
    pub gaps_us: Vec<u64>,
    /// Tokens of the whole prompt.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that the daemon did not compute.
    pub reused_tokens: u64,
    /// Tokens received.
    pub answer_tokens: u64,
    /// Time in the daemon's queue; 0 without a complete answer.
    pub queue_us: u64,
    /// Why it has no complete answer.
    pub error: Option<Problem>,
}

/// An error of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// Its name, for counting.
    pub name: String,
    /// Its message.
    pub message: String,
    /// The benchmark itself cancelled the request, after Ctrl-C.
    pub cancelled: bool,
}

/// Microseconds of the monotonic clock, which all processes of the machine share.
pub fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let micros = |part: i64, factor: i64| u64::try_from(part.saturating_mul(factor)).unwrap_or(0);
    micros(now.tv_sec, 1_000_000).saturating_add(micros(now.tv_nsec, 1) / 1000)
}

/// Writes a line.
///
/// # Errors
/// Those of writing.
pub fn write_line(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    out.write_all(&line)?;
    out.flush()
}

/// Reads a line; `None` at the end.
///
/// # Errors
/// Those of reading; `InvalidData` or `UnexpectedEof` for a line that is no such value.
pub fn read_line<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    if from.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_as_they_were() {
        let job = Job { number: u64::MAX, due_us: Some(3), prompt_tokens: 4, answer_tokens: 5 };
        let mut bytes = Vec::new();
        write_line(&mut bytes, &job).unwrap();
        write_line(&mut bytes, &job).unwrap();
        bytes.extend(b"{\"numb");
        let mut from = &bytes[..];
        assert_eq!(read_line(&mut from).unwrap(), Some(job.clone()));
        assert_eq!(read_line(&mut from).unwrap(), Some(job));
        assert!(read_line::<Job>(&mut from).is_err(), "half a line");
        assert_eq!(read_line::<Job>(&mut from).unwrap(), None);
    }

    #[test]
    fn the_clock_goes_on() {
        let before = now_us();
        assert!(before > 0 && before <= now_us());
    }
}
