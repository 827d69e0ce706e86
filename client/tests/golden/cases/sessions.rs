//! Cases of the messages about sessions, and of answers with extensions.

use super::*;

pub fn all(generate: &GenerateRequest, end: &GenerateEnd) -> Vec<Golden> {
    let session = SessionEntry {
        name: "letters".into(),
        model: "smollm2-135m-instruct-q4_1".into(),
        messages: Some(6),
        tokens: 412,
        age_ms: 90_500,
        bytes: 2310,
        in_use: true,
        ext: vec![],
    };
    let forget = ForgetSessionRequest { scope: SessionScope::Name("letters".into()), ext: vec![] };
    let groups = [
        three(Op::Sessions, SessionsRequest { ext: vec![] }),
        three(Op::Reply, SessionsReply { sessions: vec![session], ext: vec![] }),
        three(Op::ForgetSession, forget),
        three(Op::Reply, ForgetSessionReply { forgotten: 1, ext: vec![] }),
    ];
    let at = |stream| At { stream, flags: Flags::NONE, n_fds: 0 };
    let reused = GenerateEnd { ext: number_ext([(EXT_END_REUSED, 30)]), ..end.clone() };
    let reused = frame(Op::End, "reused", at(11), reused);
    let named = frame(Op::Generate, "session", at(13), generate.clone().with_session("letters"));
    let ext = number_ext([(EXT_END_REUSED, 30), (EXT_END_SESSION, 95)]);
    let ended = frame(Op::End, "session", at(13), GenerateEnd { ext, ..end.clone() });
    let ordered = generate.clone().with_priority(200).with_context_shift(7);
    let ordered = frame(Op::Generate, "ordered", at(15), ordered);
    let dropped = GenerateEnd { ext: number_ext([(EXT_END_DROPPED, 95)]), ..end.clone() };
    let dropped = frame(Op::End, "dropped", at(15), dropped);
    let schema = AnswerForm::new(FormKind::JsonSchema, r#"{"type": "string", "maxLength": 3}"#);
    let formed = frame(Op::Generate, "schema", at(17), generate.clone().with_form(&schema));
    let bias = vec![(7, -100.0), (400, 0.5)];
    let penalties = Penalties { repeat: 1.5, frequency: 0.25, presence: -0.5, last: 64, prompt: true, bias };
    let grammar = AnswerForm::new(FormKind::Lark, &format!("start: /{}/", "a".repeat(5000)));
    let both = generate.clone().with_form(&grammar).with_penalties(&penalties);
    let both = frame(Op::Generate, "penalties", at(19), both);
    let extras = format!(r#"{{"tools": [], "variables": {{"a": "{}"}}}}"#, "a".repeat(5000));
    let tools = frame(Op::Generate, "tools", at(21), generate.clone().with_marks().with_chat_extras(&extras));
    let dry = Dry { multiplier: 0.75, allowed_length: 3, last: 256, ..Dry::default() };
    let samplers = Samplers { typical_p: 0.5, top_n_sigma: 1.5, mirostat: true, dry, ..Samplers::default() };
    let samplers = frame(
        Op::Generate,
        "samplers",
        at(23),
        generate
            .clone()
            .with_samplers(&samplers)
            .with_form(&AnswerForm::new(FormKind::Gbnf, "root ::= [a-z]+")),
    );
    let scores = frame(Op::Generate, "scores", at(25), generate.clone().with_scores(5));
    let options = EmbeddingOptions { pooling: Some(Pooling::Mean), normalise: true };
    let embedding = frame(Op::Generate, "embedding", at(27), generate.clone().with_embedding(options));
    // More numbers than another extension holds.
    let numbers = (0..1100u16).flat_map(|number| f32::from(number).to_le_bytes()).collect();
    let embedded = GenerateEnd { ext: vec![(EXT_END_EMBEDDING, numbers)], ..end.clone() };
    let embedded = frame(Op::End, "embedding", at(27), embedded);
    let drafting = frame(Op::Generate, "drafts", at(29), generate.clone().with_drafts(16));
    let ext = number_ext([(EXT_END_DRAFTED, 40), (EXT_END_ACCEPTED, 31)]);
    let drafted = frame(Op::End, "drafts", at(29), GenerateEnd { ext, ..end.clone() });
    let document = "a".repeat(5000);
    let ranking = frame(Op::Generate, "document", at(30), generate.clone().with_document(&document));
    let relevance =
        GenerateEnd { ext: vec![(EXT_END_RELEVANCE, 0.75f32.to_le_bytes().to_vec())], ..end.clone() };
    let ranked = frame(Op::End, "relevance", at(30), relevance);
    let all = [
        drafting, drafted, reused, named, ended, ordered, dropped, formed, both, tools, samplers, scores,
        embedding, embedded, ranking, ranked,
    ];
    groups.into_iter().flatten().chain(all).collect()
}
