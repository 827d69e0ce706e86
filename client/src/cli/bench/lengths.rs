//! How many tokens prompts and answers have.

use std::fmt;
use std::str::FromStr;

use rocmforge_client::wire::limits::IDS_MAX;

use super::random::Random;

/// Most tokens of a prompt: a request holds no more ids.
pub const TOKENS_MAX: u32 = IDS_MAX as u32;

/// Largest sigma: with it, one draw in six is more than 54 times the median.
const SIGMA_MAX: f64 = 4.0;

/// A distribution of numbers of tokens, each from 1 to [`TOKENS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// `N`: always the same.
    Fixed(u32),
    /// `A-B`: each number in the range is as likely.
    Uniform { min: u32, max: u32 },
    /// `lognormal:MEDIAN,SIGMA`: the logarithm is normal with standard deviation sigma. Longer ones are cut to `max`.
    LogNormal { median: u32, sigma: f64, max: u32 },
}

/// Why a text is no distribution.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum LengthsError {
    #[error("give N, A-B, lognormal:MEDIAN,SIGMA or lognormal:MEDIAN,SIGMA,MAX")]
    Form,
    #[error("{0:?} is no number of tokens: give 1 to {TOKENS_MAX}")]
    Tokens(String),
    #[error("{max} is less than {min}: give the smaller number first")]
    Reversed { min: u32, max: u32 },
    #[error("{0:?} is no sigma: give a number from 0 to {SIGMA_MAX}")]
    Sigma(String),
}

impl Lengths {
    /// Draws a number of tokens.
    pub fn draw(&self, random: &mut Random) -> u32 {
        match *self {
            Self::Fixed(tokens) => tokens,
            Self::Uniform { min, max } => {
                let width = u64::from(max) - u64::from(min) + 1;
                min.saturating_add(u32::try_from(random.below(width)).unwrap_or(0))
            }
            Self::LogNormal { median, sigma, max } => {
                let drawn = f64::from(median) * (sigma * random.normal()).exp();
                // `as` saturates, so a draw above 2^32 becomes `max` too.
                (drawn.round() as u32).clamp(1, max)
            }
        }
    }
}

impl FromStr for Lengths {
    type Err = LengthsError;

    fn from_str(text: &str) -> Result<Self, LengthsError> {
        if let Some(parameters) = text.strip_prefix("lognormal:") {
            let parts: Vec<_> = parameters.split(',').collect();
            let (median, sigma, max) = match parts[..] {
                [median, sigma] => (tokens(median)?, sigma, TOKENS_MAX),
                [median, sigma, max] => (tokens(median)?, sigma, tokens(max)?),
                _ => return Err(LengthsError::Form),
            };
            if max < median {
                return Err(LengthsError::Reversed { min: median, max });
            }
            let parsed: Option<f64> = sigma.parse().ok();
            let sigma = parsed.filter(|sigma| (0.0..=SIGMA_MAX).contains(sigma));
            let sigma = sigma.ok_or_else(|| LengthsError::Sigma(parts[1].to_owned()))?;
            return Ok(Self::LogNormal { median, sigma, max });
        }
        if !text.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(LengthsError::Form);
        }
        match text.split_once('-') {
            None => Ok(Self::Fixed(tokens(text)?)),
            Some((min, max)) => {
                let (min, max) = (tokens(min)?, tokens(max)?);
                if max < min {
                    Err(LengthsError::Reversed { min, max })
                } else {
                    Ok(Self::Uniform { min, max })
                }
            }
        }
    }
}

fn tokens(text: &str) -> Result<u32, LengthsError> {
    let number = text.parse().ok().filter(|number| (1..=TOKENS_MAX).contains(number));
    number.ok_or_else(|| LengthsError::Tokens(text.to_owned()))
}

impl fmt::Display for Lengths {
    /// The text that parses to it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(tokens) => write!(f, "{tokens}"),
            Self::Uniform { min, max } => write!(f, "{min}-{max}"),
            Self::LogNormal { median, sigma, max: TOKENS_MAX } => write!(f, "lognormal:{median},{sigma}"),
            Self::LogNormal { median, sigma, max } => write!(f, "lognormal:{median},{sigma},{max}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_are_read_and_written() {
        for (text, lengths) in [
            ("512", Lengths::Fixed(512)),
            ("1-9", Lengths::Uniform { min: 1, max: 9 }),
            ("lognormal:300,0.8", Lengths::LogNormal { median: 300, sigma: 0.8, max: TOKENS_MAX }),
            ("lognormal:300,0,400", Lengths::LogNormal { median: 300, sigma: 0.0, max: 400 }),
        ] {
            assert_eq!(text.parse(), Ok(lengths));
            assert_eq!(lengths.to_string(), text);
        }
    }

    #[test]
    fn errors_name_the_part_that_is_wrong() {
        let error = |text: &str| text.parse::<Lengths>().unwrap_err();
        let tokens = |text: &str| LengthsError::Tokens(text.to_owned());
        let sigma = |text: &str| LengthsError::Sigma(text.to_owned());
        for text in ["", "many", "-3", "lognormal:3", "lognormal:3,1,9,9", "normal:3,1"] {
            assert_eq!(error(text), LengthsError::Form, "{text}");
        }
        assert_eq!(error("0"), tokens("0"));
        assert_eq!(error("1-"), tokens(""));
        assert_eq!(error("1-99999999999"), tokens("99999999999"));
        assert_eq!(error("9-1"), LengthsError::Reversed { min: 9, max: 1 });
        assert_eq!(error("lognormal:9,1,8"), LengthsError::Reversed { min: 9, max: 8 });
        assert_eq!(error("lognormal:9,NaN"), sigma("NaN"));
        assert_eq!(error("lognormal:9,5"), sigma("5"));
    }

    #[test]
    fn draws_are_in_range_and_have_the_median() {
        let mut random = Random::new(3);
        let mut draws = |text: &str| {
            let lengths: Lengths = text.parse().unwrap();
            let mut drawn: Vec<u32> = (0..9999).map(|_| lengths.draw(&mut random)).collect();
            drawn.sort_unstable();
            drawn
        };
        assert!(draws("7").iter().all(|tokens| *tokens == 7));
        let uniform = draws("3-6");
        assert_eq!((uniform[0], uniform[9998]), (3, 6));
        let lognormal = draws("lognormal:400,0.5,2000");
        assert!((380..420).contains(&lognormal[4999]), "{}", lognormal[4999]);
        assert!(lognormal[9998] <= 2000);
        // 84 % of a normal distribution are below one standard deviation.
        let expected = 400.0 * 0.5f64.exp();
        assert!((f64::from(lognormal[8413]) - expected).abs() < 40.0, "{}", lognormal[8413]);
        assert!(draws("lognormal:1,4").iter().all(|tokens| (1..=TOKENS_MAX).contains(tokens)));
    }
}
