//! Other names for models: tools that know one vendor's names get a model of the daemon's.

use std::collections::BTreeMap;
use std::str::FromStr;

use rocmforge_client::ClientError;
use rocmforge_client::wire::ModelSummary;
use serde_json::Value;

use crate::Gateway;
use crate::failure::Failure;
use crate::models::servable;
use crate::ollama::untagged;
use crate::params::Params;

/// In place of a name: all that no model has, and none at all.
const OTHERS: &str = "*";

/// Fields of a request that name its model: the second one is of older clients of Ollama.
const FIELDS: [&str; 2] = ["model", "name"];

/// A name, and the model that it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alias {
    name: String,
    model: String,
}

impl FromStr for Alias {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            Some((name, model)) if !name.is_empty() && !model.is_empty() => {
                Ok(Self { name: name.to_owned(), model: model.to_owned() })
            }
            _ => Err("an alias is NAME=MODEL, or *=MODEL for all names that no model has"),
        }
    }
}

/// All aliases of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Aliases {
    named: BTreeMap<String, String>,
    others: Option<String>,
}

impl FromIterator<Alias> for Aliases {
    /// Of two with the same name, the last one counts.
    fn from_iter<I: IntoIterator<Item = Alias>>(list: I) -> Self {
        let mut all = Self::default();
        for Alias { name, model } in list {
            if name == OTHERS {
                all.others = Some(model);
            } else {
                all.named.insert(name, model);
            }
        }
        all
    }
}

impl Aliases {
    /// Puts the model that its name stands for into a request. Asks the daemon for its models where `*` is an alias.
    ///
    /// # Errors
    /// Errors of the daemon.
    pub async fn apply(&self, gateway: &Gateway, params: &mut Params) -> Result<(), Failure> {
        if *self == Self::default() {
            return Ok(());
        }
        let given = FIELDS.map(|field| (field, params.copy(field)));
        let given = given.into_iter().find(|(_, value)| !(value.is_null() || value == ""));
        let (field, asked) = given.unwrap_or((FIELDS[0], Value::Null));
        let plain = match &asked {
            Value::String(name) => Some(untagged(name)),
            Value::Null => None,
            _ => return Ok(()), // it is refused as what it is
        };
        if let Some(model) = plain.and_then(|name| self.named.get(name)) {
            params.set(field, model.as_str().into());
            return Ok(());
        }
        let Some(others) = &self.others else { return Ok(()) };
        let known = match plain {
            Some(name) => servable(&gateway.client).await?.iter().any(|model| model.name == name),
            None => false,
        };
        if !known {
            params.set(field, others.as_str().into());
        }
        Ok(())
    }

    /// The models that can answer, and once more under each alias.
    ///
    /// # Errors
    /// Errors of the daemon and of the connection to it.
    pub async fn listed(&self, gateway: &Gateway) -> Result<Vec<ModelSummary>, ClientError> {
        let mut models = servable(&gateway.client).await?;
        for (name, model) in &self.named {
            let of = models.iter().find(|summary| summary.name == *model).cloned();
            models.retain(|summary| summary.name != *name);
            models.extend(of.map(|summary| ModelSummary { name: name.clone(), ..summary }));
        }
        Ok(models)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_is_a_name_and_a_model() {
        let alias: Alias = "gpt-4o=qwen=2".parse().unwrap();
        assert_eq!(alias, Alias { name: "gpt-4o".into(), model: "qwen=2".into() });
        for text in ["", "a", "=a", "a="] {
            assert!(text.parse::<Alias>().is_err(), "{text}");
        }
        let list = ["a=b", "*=c", "a=d"].map(|text| text.parse::<Alias>().unwrap());
        let all: Aliases = list.into_iter().collect();
        assert_eq!((all.named, all.others), (BTreeMap::from([("a".into(), "d".into())]), Some("c".into())));
    }
}
