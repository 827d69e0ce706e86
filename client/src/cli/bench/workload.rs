//! The requests of a benchmark: how many, when, and how long.

use super::arrivals::{Arrivals, Times};
use super::lengths::Lengths;
use super::link::Job;
use super::random::{Purpose, Random};

/// When a benchmark ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Until {
    /// After this many requests.
    Requests(u64),
    /// No request arrives after this time; those that arrived before are answered.
    Elapsed { us: u64 },
}

/// Makes requests one after the other.
#[derive(Debug)]
pub struct Workload {
    seed: u64,
    prompt_tokens: Lengths,
    answer_tokens: Lengths,
    until: Until,
    times: Times,
    number: u64,
}

impl Workload {
    pub fn new(
        seed: u64,
        arrivals: Arrivals,
        prompt_tokens: Lengths,
        answer_tokens: Lengths,
        until: Until,
    ) -> Self {
        Self { seed, prompt_tokens, answer_tokens, until, times: arrivals.times(seed), number: 0 }
    }

    /// The next request, `elapsed_us` after the beginning; its time is counted from the beginning too. `None` when no
    /// more arrive.
    pub fn next(&mut self, elapsed_us: u64) -> Option<Job> {
        if matches!(self.until, Until::Requests(requests) if self.number >= requests) {
            return None;
        }
        let due_us = self.times.next();
        if matches!(self.until, Until::Elapsed { us } if due_us.unwrap_or(elapsed_us) >= us) {
            return None;
        }
        let mut random = Random::of(self.seed, Purpose::Lengths, self.number);
        let job = Job {
            number: self.number,
            due_us,
            prompt_tokens: self.prompt_tokens.draw(&mut random),
            answer_tokens: self.answer_tokens.draw(&mut random),
        };
        self.number += 1;
        Some(job)
    }

    /// Requests in all, where that is known.
    pub fn total(&self) -> Option<u64> {
        match self.until {
            Until::Requests(requests) => Some(requests),
            Until::Elapsed { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(arrivals: &str, until: Until) -> Workload {
        let [prompt, answer] = ["1-100", "lognormal:50,0.5"].map(|text| text.parse().unwrap());
        Workload::new(4, arrivals.parse().unwrap(), prompt, answer, until)
    }

    fn all(mut workload: Workload) -> Vec<Job> {
        std::iter::from_fn(|| workload.next(0)).collect()
    }

    #[test]
    fn as_many_requests_come_as_were_asked_for() {
        let closed = all(workload("closed", Until::Requests(50)));
        assert_eq!(closed.len(), 50);
        assert!(closed.iter().zip(0..).all(|(job, number)| job.number == number && job.due_us.is_none()));
        assert_eq!(all(workload("closed", Until::Requests(0))), []);
        let open = all(workload("poisson:5", Until::Requests(50)));
        let lengths = |jobs: &[Job]| -> Vec<_> {
            jobs.iter().map(|job| (job.prompt_tokens, job.answer_tokens)).collect()
        };
        assert_eq!(lengths(&closed), lengths(&open), "lengths do not depend on arrivals");
    }

    #[test]
    fn no_request_arrives_after_the_duration() {
        let until = Until::Elapsed { us: 2_000_000 };
        assert_eq!(all(workload("bursts:3/1", until)).len(), 6);
        let mut closed = workload("closed", until);
        assert!(closed.next(1_999_999).is_some() && closed.next(2_000_000).is_none());
    }
}
