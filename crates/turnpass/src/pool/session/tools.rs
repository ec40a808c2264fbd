//! Calls of the host's tools: what the CLI lists, what it calls, what it is answered.

use super::*;

impl Session {
    /// Calls that wait for the host's results.
    pub(crate) fn awaited(&self) -> Vec<ToolUseId> {
        self.pairing.awaited().cloned().collect()
    }

    /// The model's message has ended with these calls.
    pub(crate) fn announce(&mut self, calls: &[ToolUseId]) {
        for call in calls {
            let announced = self.pairing.announce(call);
            if let pairing::Announced::Refused(why) = announced {
                tracing::warn!(?why, "a call of the model cannot be paired");
            }
        }
    }

    /// Gives the host's result of a call.
    pub(crate) fn answer(&mut self, result: ToolResult) -> Result<()> {
        match self.pairing.give(result) {
            Given::Answered(answer) => self.write_answer(&answer, false),
            // The plan saw to it that all awaited calls and no others are answered.
            _ => Ok(()),
        }
    }

    /// Whether results can be given so that the CLI ends its turn with them: every call is here, since one that came later
    /// would not get its result any more, and one of the results is no error.
    pub(crate) fn can_end_with(&mut self, results: &[&ToolResult]) -> Result<bool> {
        while let Some(occurrence) = self.carrier.waiting() {
            self.occurred(occurrence)?;
        }
        let is_open = |id: &ToolUseId| self.pairing.open().any(|open| open == id);
        Ok(self.pairing.awaited().all(is_open)
            && results
                .iter()
                .any(|result| !result.is_error && is_open(&result.id)))
    }

    /// Gives results after which the CLI ends its turn without a request, so that what the host says beside them can
    /// follow as a line of its own, in one message with them (2.1.294, 2.1.310, 2.1.332).
    pub(crate) fn answer_and_end(&mut self, results: &[&ToolResult]) -> Result<()> {
        let mut has_ended = false;
        for result in results {
            let Given::Answered(answer) = self.pairing.give((*result).clone()) else {
                continue;
            };
            let ends = !has_ended && !answer.result.is_error;
            has_ended |= ends;
            self.write_answer(&answer, ends)?;
        }
        self.ended_turns += 1;
        Ok(())
    }

    pub(super) fn write_answer(&self, answer: &pairing::Answer<Address>, ends: bool) -> Result<()> {
        let stdin = self.group.stdin();
        self.carrier.answer(stdin, &answer.to, &answer.result, ends)
    }

    /// Waits until what goes another way than lines do may be given: the CLI has taken what was written before.
    pub(crate) async fn before_answers(&mut self) -> Result<()> {
        match self.carrier.is_apart() {
            true => self.settled().await,
            false => Ok(()),
        }
    }

    /// Waits until a line may follow answers that went another way: the CLI has ended the turn that they end. A line that
    /// it reads before would get its own words around it.
    pub(crate) async fn after_last_answers(&mut self) -> Result<()> {
        if !self.carrier.is_apart() {
            return Ok(());
        }
        let ended = async {
            while self.ended_turns > 0 {
                self.next(None).await?;
            }
            Ok(())
        };
        match tokio::time::timeout(TURN_END_LIMIT, ended).await {
            Ok(ended) => ended,
            Err(_) => Err(late("end its turn with results", TURN_END_LIMIT)),
        }
    }

    /// Waits until the CLI has the host's tools, all of them and no others, before it is told anything.
    ///
    /// # Errors
    ///
    /// `mcp_startup`, `isolation_mcp` or `isolation_tools`.
    pub(crate) async fn check_tools(&mut self, catalogue: &Catalogue) -> Result<()> {
        if catalogue.is_empty() {
            return Ok(());
        }
        // Before the CLI has taken the tools over it lists none (2.1.294 to 2.1.332).
        self.settled().await?;
        let reply = tokio::time::timeout(TOOLS_LIMIT, self.connected()).await;
        let reply = reply.map_err(|_| {
            let limit = TOOLS_LIMIT.as_secs();
            let what = format!("the CLI did not fetch the tools within {limit} s");
            Error::new(ErrorCode::McpStartup, what)
        })??;
        let [server] = reply.servers.as_slice() else {
            let what = format!("the CLI has {} tool servers", reply.servers.len());
            return Err(Error::new(ErrorCode::IsolationMcp, what));
        };
        if server.name != MCP_SERVER {
            let what = "the CLI has another tool server than the host's";
            return Err(Error::new(ErrorCode::IsolationMcp, what));
        }
        if server.status != "connected" {
            let what = format!("the tool server is {:?}", names::shown(&server.status));
            return Err(Error::new(ErrorCode::McpStartup, what));
        }
        let prefix = format!("mcp__{MCP_SERVER}__");
        let listed: Vec<String> = server
            .tools
            .iter()
            .flatten()
            .map(|tool| match tool.name.starts_with(&prefix) {
                true => tool.name.clone(),
                false => format!("{prefix}{}", tool.name),
            })
            .collect();
        let listed = listed.iter().map(String::as_str);
        check_tools(listed, catalogue.expected_tool_names()).into_result()
    }

    /// What the CLI says of its tool servers once none of them is on its way.
    pub(super) async fn connected(&mut self) -> Result<McpStatusReply> {
        loop {
            let reply = self.control(&ControlRequest::McpStatus {}).await?;
            let reply: McpStatusReply = serde_json::from_str(reply.get()).map_err(|_| {
                let what = "the CLI's answer to mcp_status has an unknown shape";
                Error::new(ErrorCode::ProtocolShape, what)
            })?;
            if !reply
                .servers
                .iter()
                .any(|server| server.status == "pending")
            {
                return Ok(reply);
            }
            match self.carrier.is_listed() {
                // It tells nobody when it has taken over what it fetched.
                true => tokio::time::sleep(TOOLS_PAUSE).await,
                false => drop(self.next(None).await?),
            }
        }
    }

    pub(super) fn called(&mut self, record: &Bytes) -> Result<()> {
        let Some(wrapped) = in_band::unwrap(record) else {
            return Ok(());
        };
        let address = wrapped.return_address();
        let Carrier::InBand(Some(server)) = &mut self.carrier else {
            let mut line = in_band::wrap_error(&address, "no MCP server of that name is here");
            line.push(b'\n');
            self.group.stdin().write(line)?;
            return Ok(());
        };
        let reply = wrapped.handle(server);
        if let Some(mut message) = reply.message {
            message.push(b'\n');
            self.group.stdin().write(message)?;
        }
        match reply.occurrence {
            Occurrence::Call(call) => {
                self.arrived(call.tool_use_id, Address::InBand(address, call.rpc_id))
            }
            Occurrence::Cancelled(id) => {
                self.given_up(|to| matches!(to, Address::InBand(_, of) if *of == id))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn occurred(&mut self, occurrence: http::Occurrence) -> Result<()> {
        match occurrence {
            http::Occurrence::Call { call, to } => {
                self.arrived(call.tool_use_id, Address::Http(to))
            }
            http::Occurrence::Cancelled(to) => self.given_up(|of| *of == Address::Http(to)),
            http::Occurrence::Listed | http::Occurrence::Violation(_) => Ok(()),
        }
    }

    pub(super) fn arrived(&mut self, id: Option<ToolUseId>, to: Address) -> Result<()> {
        match self.pairing.arrived(id, to) {
            Arrived::Waits | Arrived::Parked => Ok(()),
            Arrived::Answered(answer) | Arrived::Refused(_, answer) => {
                self.write_answer(&answer, false)
            }
        }
    }

    pub(super) fn given_up(&mut self, is: impl Fn(&Address) -> bool) -> Result<()> {
        match self.pairing.cancelled(is) {
            Some(answer) => self.write_answer(&answer, false),
            None => Ok(()),
        }
    }
}
