//! A running answer of the daemon, in the form that every API needs: pieces of text, with tokens where they are wanted.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::try_join_all;
use rocmforge_client::asynchronous::Generation;
use rocmforge_client::calls::{Event, Parser};
use rocmforge_client::wire::{
    DetokenizeRequest, ErrorCode, GenerateEnd, GenerateItem, GenerateRequest, StopReason, Usage,
};
use rocmforge_client::{ClientError, random_request_id};

use crate::Gateway;
use crate::token_texts::{TokenText, TokenTexts, detokenize};

/// Most bytes of an answer that is returned whole: a context of a million tokens has fewer.
const WHOLE_BYTES_MAX: usize = 64 << 20;
/// Most bytes of the tokens and alternatives of such an answer. As JSON they take up to ten times that.
const WHOLE_TOKENS_BYTES_MAX: usize = 8 << 20;
/// Bytes of a token or an alternative beside its text.
const TOKEN_BYTES: usize = 64;

/// A request for tokens, and what the API wants to know about them.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The daemon's request.
    pub request: GenerateRequest,
    /// Whether each token is wanted with its text and log-probability.
    pub tokens: bool,
    /// Whether the text that ended the answer is wanted.
    pub stop_text: bool,
    /// The reader that cuts a chat's text into parts.
    pub reader: Option<Reader>,
    /// The prompt comes before the answer.
    pub echo: Option<Echo>,
}

/// A prompt that is told before its answer, with log-probabilities of its tokens if those of the answer are wanted.
#[derive(Clone, Debug)]
pub struct Echo {
    /// The prompt's text.
    pub text: String,
    /// No answer is wanted. The daemon makes one of one token, which is left out.
    pub alone: bool,
}

/// Cuts the answer to a chat into text, reasoning and calls.
#[derive(Clone, Debug)]
pub struct Reader {
    /// The parser for the model's form.
    pub parser: Parser,
    /// At most one call is wanted: what follows the first is left out.
    pub single: bool,
    /// The answer must be a call, so it does not begin in the prompt's reasoning.
    pub demanded: bool,
}

/// New text of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// The text; the concatenation of all pieces is the answer.
    pub text: String,
    /// The parts into which a chat's reader cuts the text so far. They may be those of an earlier piece's text.
    pub parts: Vec<Event>,
    /// Its tokens, if they are wanted. Tokens of a stop text are among them.
    pub tokens: Vec<Token>,
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its text.
    pub text: TokenText,
    /// Its log-probability; none for the first one of a prompt.
    pub logprob: Option<f32>,
    /// Characters of the text that are its own. Some tokens of a prompt are not in its text.
    pub characters: usize,
    /// The most likely tokens at its place, most likely first.
    pub top: Vec<(TokenText, f32)>,
}

/// How an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// Why it ended.
    pub reason: StopReason,
    /// Whether the answer has whole calls of tools.
    pub called: bool,
    /// The text that ended it, if it is wanted and known.
    pub stop_text: Option<String>,
    /// Counts of tokens.
    pub usage: Usage,
    /// Prompt tokens that were not computed again.
    pub reused_tokens: u64,
    /// Tokens of the answer that are reasoning.
    pub reasoning_tokens: u64,
    /// The daemon's own report.
    pub end: GenerateEnd,
}

/// Starts an answer and waits for its first item.
async fn begin(
    gateway: &Gateway,
    request: &GenerateRequest,
) -> Result<(Generation, Option<GenerateItem>), ClientError> {
    let waits = gateway.metrics.waits();
    let mut items = gateway.client.generate(request).await?;
    // From here on the daemon counts it.
    drop(waits);
    match items.next_item().await {
        Ok(first) => Ok((items, first)),
        Err(error) => {
            if error.is_unreachable() {
                gateway.client.leave(items.connection()).await;
            }
            Err(error)
        }
    }
}

/// True if the connection or the daemon has ended, so that a request which had no answer yet may be made again.
fn is_over(error: &ClientError) -> bool {
    match error {
        ClientError::Disconnected { .. } => true,
        ClientError::Server(error) => error.code == ErrorCode::ServerDraining as u16,
        _ => false,
    }
}

/// An answer in progress. Dropping it cancels the request in the daemon.
#[derive(Debug)]
pub struct Running {
    gateway: Arc<Gateway>,
    items: Generation,
    /// The item that was awaited before the response began.
    first: Option<GenerateItem>,
    prompt_tokens: usize,
    texts: Option<TokenTexts>,
    /// Ids of the answer, if the text that ends it must be found.
    ids: Option<Vec<u32>>,
    stops: Vec<String>,
    text_bytes: usize,
    /// Whether the text begins with a space, once there is any.
    begins_with_space: Option<bool>,
    model: String,
    reader: Option<Reader>,
    /// A call has ended; and a whole one.
    call_ended: bool,
    called: bool,
    /// Tokens of reasoning, and those of which the reader has not yet said what they are.
    reasoning_tokens: u64,
    unread_tokens: u64,
    ended: bool,
    /// The prompt's text, until it was told.
    echo: Option<String>,
    /// Nothing of the answer is told.
    silent: bool,
}

impl Running {
    /// Starts an answer and waits for its first token, so that a refusal still decides the response's status.
    ///
    /// # Errors
    /// Errors of the daemon and of the connection to it.
    pub async fn start(
        gateway: &Arc<Gateway>,
        mut wanted: Wanted,
        since: Instant,
    ) -> Result<Self, ClientError> {
        wanted.request.request_id = random_request_id();
        let (items, first) = match begin(gateway, &wanted.request).await {
            // Nothing of the answer is anywhere yet: a daemon that starts again may give it.
            Err(error) if is_over(&error) => begin(gateway, &wanted.request).await?,
            begun => begun?,
        };
        gateway.metrics.first_byte(since.elapsed());
        let prompt_tokens = match (&first, items.end()) {
            (Some(first), _) => first.prompt_ids.len(),
            (None, Some(end)) => end.usage.prompt_tokens as usize,
            (None, None) => 0,
        };
        let GenerateRequest { model, stop, .. } = wanted.request;
        if let (Some(reader), Some(first)) = (&mut wanted.reader, &first)
            && first.begins_in_reasoning()
            && !reader.demanded
        {
            reader.parser.begin_in_reasoning();
        }
        Ok(Self {
            gateway: Arc::clone(gateway),
            items,
            first,
            prompt_tokens,
            texts: wanted.tokens.then(TokenTexts::default),
            ids: (wanted.stop_text && stop.len() > 1).then(Vec::new),
            stops: if wanted.stop_text { stop } else { Vec::new() },
            text_bytes: 0,
            begins_with_space: None,
            model,
            reader: wanted.reader,
            call_ended: false,
            called: false,
            reasoning_tokens: 0,
            unread_tokens: 0,
            ended: false,
            silent: wanted.echo.as_ref().is_some_and(|echo| echo.alone),
            echo: wanted.echo.map(|echo| echo.text),
        })
    }

    /// Starts so many answers to one prompt, with seeds one after the other if the request states one. They begin at once: the
    /// daemon computes the prompt for the first, and the others take its pages.
    ///
    /// # Errors
    /// As [`Running::start`].
    pub async fn start_several(
        gateway: &Arc<Gateway>,
        wanted: Wanted,
        count: u32,
        since: Instant,
    ) -> Result<Vec<Self>, ClientError> {
        let starts = (0..u64::from(count)).map(|number| {
            let mut wanted = wanted.clone();
            let sampling = &mut wanted.request.sampling;
            sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(number));
            Self::start(gateway, wanted, since)
        });
        try_join_all(starts).await
    }

    /// The whole answers, in their order.
    ///
    /// # Errors
    /// As [`Running::next`].
    pub async fn whole_of(all: &mut [Self]) -> Result<Vec<(Piece, Ended)>, ClientError> {
        try_join_all(all.iter_mut().map(Self::whole)).await
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// The gateway.
    pub fn gateway(&self) -> &Arc<Gateway> {
        &self.gateway
    }

    /// The next piece; `None` after the last one.
    ///
    /// # Errors
    /// Errors of the daemon and of the connection to it.
    pub async fn next(&mut self) -> Result<Option<Piece>, ClientError> {
        if let Some(text) = self.echo.take() {
            return Ok(Some(self.prompt(text).await?));
        }
        loop {
            let item = match self.first.take() {
                Some(item) => Some(item),
                None => self.items.next_item().await?,
            };
            self.unread_tokens += item.as_ref().map_or(0, |item| item.ids.len() as u64);
            let mut piece = match item {
                Some(item) => self.piece(item).await?,
                None if self.ended => return Ok(None),
                None => {
                    self.ended = true;
                    let text = self.items.end().map(|end| end.text.clone()).unwrap_or_default();
                    Piece { text, ..Piece::default() }
                }
            };
            self.read(&mut piece);
            self.text_bytes += piece.text.len();
            if !piece.text.is_empty() {
                self.begins_with_space.get_or_insert(piece.text.starts_with(' '));
            }
            if self.silent {
                continue;
            }
            // An item may hold only a part of a character, or the beginning of a stop text or of a mark.
            let told = if self.reader.is_some() { !piece.parts.is_empty() } else { !piece.text.is_empty() };
            if told || !piece.tokens.is_empty() {
                return Ok(Some(piece));
            }
        }
    }

    /// The prompt as a piece. Reads its items, up to the first one of the answer.
    async fn prompt(&mut self, text: String) -> Result<Piece, ClientError> {
        let (mut ids, mut scores, mut bytes) = (Vec::new(), Vec::new(), 0);
        loop {
            let item = match self.first.take() {
                Some(item) => item,
                None => match self.items.next_item().await? {
                    Some(item) => item,
                    None => break,
                },
            };
            if ids.is_empty() {
                ids.clone_from(&item.prompt_ids);
            }
            if !item.ids.is_empty() {
                self.first = Some(item);
                break;
            }
            bytes += item.logprobs.iter().map(|at| TOKEN_BYTES * (1 + at.top.len())).sum::<usize>();
            if bytes > WHOLE_TOKENS_BYTES_MAX {
                return Err(
                    rocmforge_client::ProtocolError::AnswerTooLong { max: WHOLE_TOKENS_BYTES_MAX }.into()
                );
            }
            scores.extend(item.logprobs);
        }
        let Some(texts) = &mut self.texts else { return Ok(Piece { text, ..Piece::default() }) };
        let likely = scores.iter().flat_map(|at| at.top.iter().map(|top| top.id));
        texts
            .learn(
                (&self.gateway.client, &self.items),
                &self.model,
                ids.iter().copied().chain(likely).collect(),
            )
            .await?;
        let mut rest = text.as_str();
        let scores = std::iter::once(None).chain(scores.into_iter().map(Some));
        let tokens = ids.iter().zip(scores).map(|(id, at)| {
            let token = texts.of(*id);
            // Tokenizers add tokens, and a space before the first word, which the prompt does not have.
            let mine = [token.text.as_str(), token.text.trim_start()]
                .into_iter()
                .find_map(|text| rest.strip_prefix(text));
            let characters = mine.map_or(0, |after| rest.chars().count() - after.chars().count());
            rest = mine.unwrap_or(rest);
            let top = at.iter().flat_map(|at| &at.top).map(|top| (texts.of(top.id), top.logprob)).collect();
            Token { text: token, logprob: at.as_ref().map(|at| at.logprob), characters, top }
        });
        Ok(Piece { tokens: tokens.collect(), text, parts: Vec::new() })
    }

    async fn piece(&mut self, item: GenerateItem) -> Result<Piece, ClientError> {
        if let Some(ids) = &mut self.ids {
            ids.extend(&item.ids);
        }
        let Some(texts) = &mut self.texts else {
            return Ok(Piece { text: item.text, ..Piece::default() });
        };
        let mut ids = item.ids.clone();
        ids.extend(item.logprobs.iter().flat_map(|logprob| logprob.top.iter().map(|top| top.id)));
        texts.learn((&self.gateway.client, &self.items), &self.model, ids).await?;
        let tokens = item.ids.iter().zip(&item.logprobs).map(|(id, at)| Token {
            characters: texts.of(*id).text.chars().count(),
            text: texts.of(*id),
            logprob: Some(at.logprob),
            top: at.top.iter().map(|top| (texts.of(top.id), top.logprob)).collect(),
        });
        Ok(Piece { tokens: tokens.collect(), text: item.text, parts: Vec::new() })
    }

    /// Cuts the piece's text into parts, if the answer has a reader.
    fn read(&mut self, piece: &mut Piece) {
        let Some(reader) = &mut self.reader else { return };
        let mut parts = Vec::new();
        reader.parser.push(&piece.text, &mut parts);
        if self.ended {
            reader.parser.finish(&mut parts);
        }
        match parts.last() {
            None => {}
            Some(Event::Reasoning(_)) => self.reasoning_tokens += std::mem::take(&mut self.unread_tokens),
            Some(_) => self.unread_tokens = 0,
        }
        for part in parts {
            if reader.single && self.call_ended {
                continue;
            }
            self.call_ended |= matches!(part, Event::CallEnd { .. });
            self.called |= part == Event::CallEnd { whole: true };
            piece.parts.push(part);
        }
    }

    /// How the answer ended; call it after the last piece.
    ///
    /// # Errors
    /// Errors of the connection to the daemon.
    pub async fn end(&self) -> Result<Ended, ClientError> {
        let end = self
            .items
            .end()
            .cloned()
            .ok_or_else(|| ClientError::Disconnected { reason: "the answer has no end".to_owned() })?;
        let stop_text = match end.stop_reason {
            StopReason::StopText => self.stop_text().await?,
            _ => None,
        };
        let (reason, mut usage, reused_tokens) = (end.stop_reason, end.usage, end.reused_tokens());
        if self.silent {
            usage.generated_tokens = 0;
        }
        let (called, reasoning_tokens) = (self.called, self.reasoning_tokens);
        Ok(Ended { reason, called, stop_text, usage, reused_tokens, reasoning_tokens, end })
    }

    /// The stop text that ended the answer: the tokens have it, right after the text that was sent.
    async fn stop_text(&self) -> Result<Option<String>, ClientError> {
        let Some(ids) = &self.ids else { return Ok(self.stops.first().cloned()) };
        let request = DetokenizeRequest {
            model: self.model.clone(),
            ids: ids.clone(),
            show_special: false,
            ext: vec![],
        };
        // The answer is complete without it.
        let Ok(reply) = detokenize(&self.gateway.client, &self.items, &request).await else {
            return Ok(None);
        };
        let text = reply.text;
        // Some tokenizers decode ids to a text without the space that the first token begins with.
        let lacks_space = self.begins_with_space == Some(true) && !text.starts_with(' ');
        let rest = text.get(self.text_bytes.saturating_sub(lacks_space.into())..).unwrap_or_default();
        Ok(self.stops.iter().find(|stop| rest.starts_with(stop.as_str())).cloned())
    }

    /// The whole answer.
    ///
    /// # Errors
    /// As [`Running::next`].
    pub async fn whole(&mut self) -> Result<(Piece, Ended), ClientError> {
        let (mut all, mut tokens_bytes) = (Piece::default(), 0);
        while let Some(piece) = self.next().await? {
            all.text.push_str(&piece.text);
            for part in piece.parts {
                join(&mut all.parts, part);
            }
            tokens_bytes +=
                piece.tokens.iter().map(|token| TOKEN_BYTES * (1 + token.top.len())).sum::<usize>();
            all.tokens.extend(piece.tokens);
            for (bytes, max) in [(all.text.len(), WHOLE_BYTES_MAX), (tokens_bytes, WHOLE_TOKENS_BYTES_MAX)] {
                if bytes > max {
                    return Err(rocmforge_client::ProtocolError::AnswerTooLong { max }.into());
                }
            }
        }
        let ended = self.end().await?;
        Ok((all, ended))
    }
}

/// Adds a part, to the text before it if that is of the same kind.
fn join(parts: &mut Vec<Event>, part: Event) {
    match (parts.last_mut(), part) {
        (Some(Event::Text(before)), Event::Text(text)) => before.push_str(&text),
        (Some(Event::Reasoning(before)), Event::Reasoning(text)) => before.push_str(&text),
        (Some(Event::Arguments(before)), Event::Arguments(text)) => before.push_str(&text),
        (_, part) => parts.push(part),
    }
}

impl Piece {
    /// The text of its parts for the reader, and the reasoning.
    pub fn texts(&self) -> (String, String) {
        let (mut text, mut reasoning) = (String::new(), String::new());
        for part in &self.parts {
            match part {
                Event::Text(more) => text.push_str(more),
                Event::Reasoning(more) => reasoning.push_str(more),
                Event::CallBegin { .. } | Event::Arguments(_) | Event::CallEnd { .. } => {}
            }
        }
        (text, reasoning)
    }
}
