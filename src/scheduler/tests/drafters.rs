//! Draft models change no token, whatever they draft, and whoever needs their pages, their weights or their file.

use super::drafts::{assert_all_happened, crowd, with_pages, with_period};
use super::fake::Fault;
use super::*;

/// An engine on which one model drafts for another. A step takes 8 ms, and 0.1 ms a row.
struct Drafting {
    rig: Rig,
    draft: Arc<Model>,
}

impl Drafting {
    /// The draft model is as slow as the other one.
    fn slow(options: EngineOptions) -> Self {
        let rig = Rig::with(Control::timed(Duration::from_millis(8), Duration::from_micros(100)), options);
        Self { rig, draft: open(2, &kept_model()) }
    }

    /// Steps of the draft model take a tenth of the time.
    fn new(options: EngineOptions) -> Self {
        Self::of(options, false)
    }

    /// And it is wrong now and then.
    fn wrong(options: EngineOptions) -> Self {
        Self::of(options, true)
    }

    fn of(options: EngineOptions, wrong: bool) -> Self {
        let drafting = Self::slow(options);
        drafting.rig.control.is_small(&drafting.draft.plan.program, wrong);
        drafting
    }

    fn job(&self, prompt: &[u32], max_tokens: u32, drafts: u32) -> (Job, Asked) {
        let (mut job, asked) = self.rig.job(prompt, max_tokens);
        (job.drafts, job.draft_model) = (drafts, Some(Arc::clone(&self.draft)));
        (job, asked)
    }

    fn ask(&self, prompt: &[u32], max_tokens: u32, drafts: u32) -> Asked {
        let (job, asked) = self.job(prompt, max_tokens, drafts);
        self.rig.handle().submit(job).unwrap();
        asked
    }

    fn assert_empty(&self) {
        self.rig.assert_empty();
        for id in [self.rig.model.id, self.draft.id] {
            self.rig.handle().model_gone(id);
        }
        assert!(self.rig.comes(|snapshot| snapshot.models.is_empty()), "a model has sequences left");
    }
}

#[test]
fn an_answer_with_a_draft_model_has_the_tokens_of_one_without() {
    let text = prompt(1, 40);
    for drafts in [1, 3, 32] {
        for max_tokens in [1, 2, 5, 31, 200] {
            for right in [true, false] {
                let options = EngineOptions::default();
                let drafting = if right { Drafting::new(options) } else { Drafting::wrong(options) };
                let answer = drafting.ask(&text, max_tokens, drafts).finish();
                assert_eq!(answer.ids, expected(&text, max_tokens as usize), "{drafts} drafts");
                let outcome = answer.outcome();
                let (drafted, accepted) = (outcome.drafted_tokens, outcome.accepted_tokens);
                assert_eq!((outcome.reason, outcome.generated_tokens), (StopReason::MaxTokens, max_tokens));
                assert!(accepted <= drafted && (!right || accepted == drafted), "{accepted} of {drafted}");
                assert!(right || max_tokens < 200 || accepted < drafted, "none of {drafted} was refused");
                assert!(max_tokens < 31 || accepted >= max_tokens / 4, "{accepted} of {max_tokens}");
                drafting.assert_empty();
            }
        }
    }
}

#[test]
fn a_draft_takes_no_longer_than_the_step_that_checks_it() {
    // One that is as slow drafts one token at a time, or none, once that is known.
    for (drafting, most) in [(Drafting::slow as fn(_) -> _, 100..=200), (Drafting::new, 10..=40)] {
        let drafting = drafting(EngineOptions::default());
        let answer = drafting.ask(&prompt(1, 40), 200, 32).finish();
        let steps = drafting.rig.handle().snapshot().counters.steps;
        assert_eq!(steps, 200 - u64::from(answer.outcome().accepted_tokens));
        assert!(most.contains(&steps), "{steps} steps");
    }
}

#[test]
fn a_draft_model_loads_when_it_first_drafts_and_computes_a_known_prompt_once() {
    let drafting = Drafting::new(EngineOptions::default());
    let loads = || drafting.rig.control.loads().len();
    assert_eq!(drafting.ask(&prompt(1, 200), 1, 8).finish().ids.len(), 1);
    let of_one = loads();
    assert_eq!(
        drafting.rig.handle().snapshot().models[1].weight_bytes,
        0,
        "an answer of one token needs no draft"
    );
    drafting.ask(&prompt(1, 200), 20, 8).finish();
    assert_eq!(loads(), 2 * of_one);
    let rows = |drafting: &Drafting| drafting.rig.control.rows();
    let before = rows(&drafting);
    drafting.ask(&prompt(1, 200), 20, 8).finish();
    assert!(
        rows(&drafting) - before < 150,
        "{} rows for a prompt that both models know",
        rows(&drafting) - before
    );
    drafting.assert_empty();
}

#[test]
fn a_shift_of_the_context_drops_the_same_tokens_as_without() {
    let answer = |drafts| {
        let drafting = Drafting::wrong(EngineOptions::default());
        let (mut job, asked) = drafting.job(&prompt(1, 40), 150, drafts);
        (job.context_tokens, job.shift) = (96, Some(3));
        drafting.rig.handle().submit(job).unwrap();
        let Answer { ids, end, .. } = asked.finish();
        let outcome = end.unwrap().unwrap();
        drafting.assert_empty();
        (ids, outcome.dropped_tokens, outcome.drafted_tokens > 0)
    };
    let (ids, dropped, _) = answer(0);
    assert!(dropped > 0);
    assert_eq!(answer(7), (ids, dropped, true));
}

#[test]
fn recurrent_models_do_without() {
    let (rig, draft) = (Rig::with(Control::recurrent(), EngineOptions::default()), open(2, &kept_model()));
    let drafting = Drafting { rig, draft };
    let answer = drafting.ask(&prompt(1, 40), 30, 8).finish();
    assert_eq!((answer.ids.clone(), answer.outcome().drafted_tokens), (expected(&prompt(1, 40), 30), 0));
    drafting.assert_empty();
}

#[test]
fn an_answer_goes_on_without_a_draft_model_that_fails() {
    // The model itself is open and waits for its first step, or has made it and the draft model waits for its own.
    for (fault, steps) in [(Fault::FailInOpen, 0), (Fault::FailInHead, 1)] {
        let drafting = Drafting::new(EngineOptions::default());
        let text = prompt(1, 20); // one chunk: the draft model draws at once
        drafting.rig.control.allow(steps);
        let asked = drafting.ask(&text, 60, 4);
        drafting.rig.control.wait_held();
        drafting.rig.control.fault(fault);
        drafting.rig.control.release();
        let answer = asked.finish();
        assert!(!drafting.rig.control.has_fault(), "{fault:?} did not happen");
        assert_eq!(
            (answer.ids.clone(), answer.outcome().drafted_tokens),
            (expected(&text, 60), 0),
            "{fault:?}"
        );
        drafting.assert_empty();
    }
}

#[test]
fn an_answer_goes_on_without_a_draft_model_whose_file_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("draft.gguf");
    std::fs::copy(kept_model(), &path).unwrap();
    let drafting = Drafting { draft: open(2, &path), ..Drafting::new(EngineOptions::default()) };
    let text = prompt(2, 40);
    drafting.rig.control.allow(3);
    let asked = drafting.ask(&text, 60, 4);
    drafting.rig.control.wait_held();
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    drafting.rig.control.release();
    let answer = asked.finish();
    assert_eq!(answer.ids, expected(&text, 60));
    let drafted = answer.outcome().drafted_tokens;
    assert!(drafted < 9, "{drafted} tokens were drafted");
    drafting.assert_empty();
}

#[test]
fn draft_models_beside_prefixes_cancels_and_few_pages_change_no_token() {
    let crowds = [(1, 1000), (2, 60), (3, 24), (4, 11)].map(|(number, pages)| {
        let drafting = Drafting::wrong(with_pages(pages));
        let job = |text: &[u32], count, drafts| drafting.job(text, count, drafts);
        let counters = crowd(&drafting.rig, number, 7, with_period, job);
        drafting.assert_empty();
        counters
    });
    assert_all_happened(&crowds);
}
